"""Runs that are killed, moved to other devices, or made of two processes."""

import shutil
import signal
import socket

import numpy as np
import pytest
import tiny_run

from eagle_jax.training import loop

ONE, EIGHT = (1, 1, 1), (2, 2, 2)


def finished(process) -> str:
  out, _ = process.communicate(timeout=500)
  assert process.returncode == 0, out[-3000:]
  return out


def on(devices: int) -> str:
  return f"--xla_force_host_platform_device_count={devices}"


def trained(base, out: str) -> list[str]:
  """Train in this process, on one device; what the run said."""
  said = []
  loop.train(tiny_run.config(base, out, mesh=ONE), said.append)
  return said


@pytest.fixture(scope="module")
def base(tmp_path_factory, program_cache):
  """A run that killed itself at step 13 of 20, in three copies."""
  base = tmp_path_factory.mktemp("runs")
  tiny_run.write(base)
  killed = {"out": "killed", "mesh": ONE, "kill_at": 13}
  process = tiny_run.start(base, program_cache, "", killed)
  out, _ = process.communicate(timeout=500)
  assert process.returncode == -signal.SIGKILL, out[-3000:]
  for copy in ("moved", "two"):
    shutil.copytree(base / "killed", base / copy)
  return base


@pytest.fixture(scope="module")
def straight(base):
  """The losses of a run that nothing happened to."""
  trained(base, "straight")
  return tiny_run.losses(base / "straight")


@pytest.fixture(scope="module")
def moved(base, program_cache):
  """The killed run, resumed on 8 devices of one process."""
  changes = {"out": "moved", "mesh": EIGHT}
  said = finished(tiny_run.start(base, program_cache, on(8), changes))
  assert "resumed at step" in said
  return tiny_run.losses(base / "moved")


def test_killed_and_resumed_is_bit_equal(base, straight):
  said = trained(base, "killed")
  assert any("resumed at step" in line for line in said)
  assert len(straight) == 20
  assert tiny_run.losses(base / "killed") == straight


def test_resumed_on_another_mesh(moved, straight):
  np.testing.assert_allclose(moved, straight, rtol=1e-4)


def test_two_processes_are_one_with_their_devices(base, moved, program_cache):
  with socket.socket() as s:
    s.bind(("localhost", 0))
    cluster = (f"localhost:{s.getsockname()[1]}", "2")
  changes = {"out": "two", "mesh": EIGHT}
  both = [
    tiny_run.start(base, program_cache, on(4), changes, *cluster, str(i))
    for i in (0, 1)
  ]
  for process in both:
    finished(process)
  np.testing.assert_allclose(tiny_run.losses(base / "two"), moved, rtol=1e-5)
