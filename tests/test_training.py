"""train(): resume is bit-equal, refusals are one line, the export decodes."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import test_data
import tiny

from eagle_jax import loading
from eagle_jax.errors import InputError
from eagle_jax.speculation import engine, tree
from eagle_jax.speculation.requests import Request
from eagle_jax.training import loop

tokenizer = test_data.tokenizer


@pytest.fixture
def setup(tmp_path, tokenizer, monkeypatch):
  """A tiny target behind the name "tiny", chats on disk, a short config."""
  target = dataclasses.replace(
    tiny.target(vocab_size=len(tokenizer)), tokenizer=tokenizer
  )
  monkeypatch.setattr(loading, "load_target", lambda name, dtype, say: target)
  rng = np.random.default_rng(0)
  words = ["red", "blue", "one", "two", "yes", "no"]
  for name, count in (("train", 24), ("held", 6)):
    rows = []
    for _ in range(count):
      text = lambda n: " ".join(rng.choice(words, n))
      rows.append(
        {
          "messages": [
            {"role": "user", "content": text(3)},
            {"role": "assistant", "content": text(6)},
          ]
        }
      )
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  config = loop.TrainConfig(
    target="tiny",
    data=(str(tmp_path / "train.jsonl"),),
    heldout=(str(tmp_path / "held.jsonl"),),
    out=str(tmp_path / "run"),
    kind="eagle3",
    taps=(),
    draft_vocab_size=40,
    init="last_layer",
    train_head=False,
    row_length=128,
    batch_size=2,
    epochs=2,
    max_chats=0,
    max_bad_rows=0,
    long_chats="split",
    pack_window=1100,
    features="online",
    unroll_steps=2,
    anchor_rows=48,
    step_decay=0.8,
    feature_weight=1.0,
    vocabulary_weight=0.1,
    feature_noise=0.1,
    learning_rate=1e-2,
    warmup_steps=2,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.01,
    clip_norm=1.0,
    eval_every=4,
    eval_rows=2,
    save_every=4,
    seed=0,
    dtype="float32",
  )
  return target, config


def weights(folder: pathlib.Path) -> bytes:
  return (folder / "model.safetensors").read_bytes()


class Stop(Exception):
  pass


class Dies:
  """A batch iterator that breaks when asked for batch number `at`."""

  def __init__(self, batches, at: int):
    self.batches, self.left = batches, at
    self.get_state = batches.get_state

  def __next__(self):
    self.left -= 1
    if not self.left:
      raise Stop
    return next(self.batches)


@pytest.mark.parametrize("features", ["online", "cached"])
def test_killed_and_resumed_is_bit_equal(setup, features, monkeypatch):
  """Stopped dead after a save, the run goes on as if nothing happened."""
  _, config = setup
  config = dataclasses.replace(config, features=features)
  straight = dataclasses.replace(config, out=config.out + "_straight")
  want = weights(loop.train(straight, lambda line: None))

  real = loop.data.iterator
  with monkeypatch.context() as patch:
    patch.setattr(loop.data, "iterator", lambda *a: Dies(real(*a), 7))
    with pytest.raises(Stop):
      loop.train(config, lambda line: None)
  said = []
  got = weights(loop.train(config, said.append))
  assert any("resumed at step 4" in line for line in said)
  assert got == want


def test_export_decodes_losslessly(setup):
  """What train() writes is what decoding reads, and it accepts drafts."""
  target, config = setup
  folder = loop.train(
    dataclasses.replace(config, epochs=8, kind="eagle"), lambda line: None
  )
  drafter = loading.load_drafter(str(folder), target, print)
  assert drafter.notes["target"] == "tiny"
  run = lambda m: engine.Engine(m, 1, None).generate([Request([1, 2, 3], 40)])[
    0
  ]
  plain = run(loading.models(target, None, tree.plain()))
  eagle = run(loading.models(target, drafter, tree.chain(2)))
  assert eagle.token_ids == plain.token_ids


def test_log_and_config_explain_the_run(setup):
  _, config = setup
  loop.train(config, lambda line: None)
  out = pathlib.Path(config.out)
  assert json.loads((out / "config.json").read_text())["unroll_steps"] == 2
  rows = [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()]
  held = [r["heldout"] for r in rows if "heldout" in r]
  assert len(held[-1]["alpha"]) == 2
  assert held[-1]["tau"] >= 1


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"kind": "medusa"}, "kind 'medusa' is unknown"),
    ({"data": ()}, "no data given"),
    ({"heldout": ()}, "no heldout given"),
    ({"epochs": 0}, "epochs 0 must be at least 1"),
    ({"batch_size": 1000}, "batch_size 1000 is more than"),
    ({"warmup_steps": 10**6}, "warmup_steps 1000000 must be below"),
    ({"features": "disk"}, "features 'disk' is unknown"),
    ({"init": "zeros"}, "init is not last_layer or random, and drafter"),
    ({"anchor_rows": 129}, "anchor_rows 129 must be 0 .all. to row_length"),
  ],
)
def test_refusals(setup, change, word):
  _, config = setup
  with pytest.raises(InputError, match=word) as e:
    loop.train(dataclasses.replace(config, **change), lambda line: None)
  assert "\n" not in str(e.value)
  assert not pathlib.Path(config.out).exists()


def test_held_out_chats_are_never_trained_on(setup):
  _, config = setup
  with pytest.raises(InputError, match="both in data and in heldout"):
    loop.train(
      dataclasses.replace(config, heldout=config.data), lambda line: None
    )


def test_another_schedule_does_not_resume(setup):
  _, config = setup
  loop.train(config, lambda line: None)
  with pytest.raises(InputError, match="another config"):
    loop.train(dataclasses.replace(config, epochs=3), lambda line: None)


def test_script_refuses_in_one_line(tmp_path):
  done = subprocess.run(
    [
      sys.executable,
      "train.py",
      "--config=configs/smollm2_eagle3.py",
      f"--config.out={tmp_path / 'run'}",
    ],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert done.returncode == 2
  assert (
    done.stderr.strip().splitlines()[-1].startswith("train.py: no data given")
  )
  assert not (tmp_path / "run").exists()
