"""The decode cycle compiles for a TPU, by the real compiler, without one."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import tpu_lowering

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures() -> dict[str, dict]:
  """what -> the line that the script printed for it."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, which holds the TPU compiler, is not installed")
  done = subprocess.run(
    [sys.executable, tpu_lowering.__file__, "--shape", "tiny"],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  return {line["what"]: line for line in lines}


@pytest.mark.parametrize("what", ["eagle", "plain"])
def test_compiles_in_place(figures, what):
  found = figures[what]
  assert found["device"].startswith("TPU")
  # the donated caches come back in their own memory
  assert found["alias_bytes"] >= found["cache_bytes"] > 0
  assert found["temp_bytes"] > 0


@pytest.mark.parametrize("what", ["eagle", "plain"])
def test_never_waits_for_the_host(figures, what):
  assert figures[what]["host_transfers"] == []


@pytest.mark.parametrize(
  "line",
  [
    "%o = token[] outfeed(%a, %t), outfeed_shape=f32[2]{0}",
    "%i = ((f32[2]{0}), token[]) infeed(%t)",
    "%s = (f32[2]{0}, u32[], token[]) send(%a, %t), channel_id=1,"
    " is_host_transfer=true",
    '%c = f32[] custom-call(%a), custom_call_target="xla_python_cpu_callback"',
    "%a.1 = f32[2]{0:T(128)S(5)} copy(%a)",
  ],
)
def test_host_transfers_are_recognised(line):
  assert tpu_lowering.HOST.search(line)
