"""Fixtures that several test files use."""

import json
import os
import pathlib
import types

# Programs compile in a quarter of the time and run slowly; the maths is the
# same. What decodes the real model asks for the optimised ones again. Before
# JAX reads it, and for the processes that tests start.
FAST = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{FAST} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

SHARED = pathlib.Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
  """The folder of public test material, where it lies beside the project."""
  if not SHARED.is_dir():
    pytest.skip("no shared/ folder beside the project")
  return SHARED


@pytest.fixture(scope="session")
def golden(shared):
  """case name -> its folder, expected arrays and settings."""

  def load(case: str):
    folder = shared / "goldens" / case
    return types.SimpleNamespace(
      folder=folder,
      arrays=np.load(folder / "expected.npz"),
      facts=json.loads((folder / "expected.json").read_text()),
    )

  return load


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory) -> str:
  """Compiled programs are kept in this folder, so that a run started again (in
  this process or one it starts) compiles nothing twice."""
  folder = jax.config.jax_compilation_cache_dir
  if not folder:
    folder = str(tmp_path_factory.mktemp("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  return folder
