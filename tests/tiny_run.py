"""A training run of seconds: folders for it, its config, and a script that
trains in a process of its own.

  python tests/tiny_run.py FOLDER CHANGES [COORDINATOR PROCESSES PROCESS]

CHANGES: JSON, fields of the config; "kill_at": the step at which the process
kills itself with SIGKILL.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import folders
import numpy as np

from configs import smollm2_eagle1
from eagle_jax import distributed
from eagle_jax.training import data, loop
from eagle_jax.training.config import TrainConfig


def write(base: pathlib.Path) -> None:
  """A target of one layer and chats, under `base`."""
  folders.target(base / "target", num_layers=1)
  rng = np.random.default_rng(0)
  words = ["red", "blue", "one", "two", "yes", "no"]
  for name, count in (("train", 40), ("held", 6)):
    rows = []
    for _ in range(count):
      text = lambda n: " ".join(rng.choice(words, n))
      pair = (("user", text(2)), ("assistant", text(8)))
      rows.append({"messages": [{"role": r, "content": x} for r, x in pair]})
    (base / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def config(base: pathlib.Path, out: str, **changes) -> TrainConfig:
  """Of a run in base/out: the EAGLE-1 recipe in small."""
  fields = {
    "target": str(base / "target"),
    "data": (str(base / "train.jsonl"),),
    "heldout": (str(base / "held.jsonl"),),
    "out": str(base / out),
    "draft_vocab_size": 40,
    "row_length": 64,
    "batch_size": 4,
    "epochs": 2,
    "features": "online",
    "unroll_steps": 2,
    "anchor_rows": 48,
    "feature_noise": 0.1,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 10,
    "eval_rows": 2,
    "save_every": 5,
  }
  return dataclasses.replace(smollm2_eagle1.get_config(), **fields | changes)


def rows(out: pathlib.Path, part: str) -> list[dict]:
  """Of a run's log."""
  lines = (out / "log.jsonl").read_text().splitlines()
  return [r for r in map(json.loads, lines) if r["part"] == part]


def losses(out: pathlib.Path) -> list[float]:
  """Of all steps, in order; each must be there once."""
  found = rows(out, "train")
  assert [r["step"] for r in found] == list(range(1, len(found) + 1))
  return [r["loss"] for r in found]


class Watched:
  """A run's rows, of which number `step` since the start calls `act` first."""

  def __init__(self, rows, step: int, act):
    self.rows, self.left, self.act = rows, step, act
    self.get_state, self.set_state = rows.get_state, rows.set_state

  def __next__(self):
    self.left -= 1
    if not self.left:
      self.act()
    return next(self.rows)


def at_step(step: int, act, patch=setattr) -> None:
  """Calls `act` when a new run asks for the rows of a step.

  Args:
    patch: as setattr; a monkeypatch's undoes it.
  """
  real = data.iterator
  patch(data, "iterator", lambda *a: Watched(real(*a), step, act))


def start(
  base: pathlib.Path, cache: str, xla_flags: str, changes: dict, *cluster: str
) -> subprocess.Popen:
  """The script as a process.

  Args:
    cache: folder for compiled programs.
  """
  env = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return subprocess.Popen(
    [sys.executable, __file__, str(base), json.dumps(changes), *cluster],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def main():
  base, changes, *cluster = sys.argv[1:]
  if cluster:
    distributed.join(cluster[0], int(cluster[1]), int(cluster[2]))
  changes = json.loads(changes)
  changes["mesh"] = tuple(changes["mesh"])  # JSON has lists
  kill_at = changes.pop("kill_at", None)
  if kill_at:
    at_step(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
  loop.train(config(pathlib.Path(base), **changes))


if __name__ == "__main__":
  main()
