"""Runs in processes of their own: killed, and two as one."""

import shutil
import signal
import socket

import numpy as np
import pytest
import tiny_run

from eagle_jax.training import loop

MESH = (2, 2, 2)


def finished(process) -> str:
  out, _ = process.communicate(timeout=500)
  assert process.returncode == 0, out[-3000:]
  return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """Two runs on 8 devices side by side: one straight, one killed at step 13."""
  base = tmp_path_factory.mktemp("runs")
  tiny_run.write(base)
  straight = tiny_run.start(base, 8, {"out": "straight", "mesh": MESH})
  killed = tiny_run.start(
    base, 8, {"out": "killed", "mesh": MESH, "kill_at": 13}
  )
  finished(straight)
  out, _ = killed.communicate(timeout=500)
  assert killed.returncode == -signal.SIGKILL, out[-3000:]
  shutil.copytree(base / "killed", base / "moved")
  return base


def test_killed_and_resumed_is_bit_equal(base):
  said = finished(tiny_run.start(base, 8, {"out": "killed", "mesh": MESH}))
  assert "resumed at step" in said
  want = tiny_run.losses(base / "straight")
  assert len(want) == 20
  assert tiny_run.losses(base / "killed") == want


def test_resumed_on_another_mesh(base):
  """From 2 x 2 x 2 devices to one."""
  said = []
  c = tiny_run.config(base, "moved", mesh=(1, 1, 1))
  loop.train(c, said.append)
  assert any("resumed at step" in line for line in said)
  np.testing.assert_allclose(
    tiny_run.losses(base / "moved"),
    tiny_run.losses(base / "straight"),
    rtol=1e-4,
  )


def test_two_processes_are_one_with_their_devices(base):
  with socket.socket() as s:
    s.bind(("localhost", 0))
    coordinator = f"localhost:{s.getsockname()[1]}"
  changes = {"out": "two", "mesh": MESH}
  both = [
    tiny_run.start(base, 4, changes, coordinator, "2", str(i)) for i in (0, 1)
  ]
  for process in both:
    finished(process)
  np.testing.assert_allclose(
    tiny_run.losses(base / "two"),
    tiny_run.losses(base / "straight"),
    rtol=1e-5,
  )
