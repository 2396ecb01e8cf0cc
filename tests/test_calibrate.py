"""The calibration counts what a loop counts, and writes what it found."""

import json
import pathlib
import types

import folders
import jax.numpy as jnp
import numpy as np
import pytest
import test_losses
import tiny
from refusals import refused

from eagle_jax import choice, loading
from eagle_jax.checkpoints import drafters
from eagle_jax.config import Sampling
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.speculation.sampling import gumbel, row_seed
from eagle_jax.training import calibrate, losses


def test_curve_against_a_loop():
  target = tiny.target()
  drafter = tiny.drafter(target)
  packed = test_losses.pack(test_losses.documents([20, 11]), 32)
  got = calibrate.curve(target, drafter, vars(packed), temperature=0.8, seed=3)
  batch = test_losses.batch_of(target, drafter, packed)
  module = Drafter(drafter.config)
  out = losses.unroll(module, drafter.params, batch, 1, None, False)[0]
  draft = module.apply({"params": drafter.params}, out, method="logits")[0]
  logits = Target(target.config).apply(
    {"params": target.params}, batch.final[0], method="logits"
  )
  for strength in calibrate.STRENGTHS:
    hits, rows = np.zeros(len(calibrate.WIDTHS)), 0
    for t in np.flatnonzero(np.asarray(losses.counted(batch, 0))[0]):
      at = jnp.asarray([packed.positions[0, t] + 2])
      noise = gumbel(row_seed(3, 0, 0)[None], at, tiny.V)[0]
      wanted = int(jnp.argmax(logits[t + 1] / 0.8 + noise))
      keys = draft[t] / 0.8 + strength * noise[drafter.vocabulary]
      best = drafter.vocabulary[np.argsort(-np.asarray(keys))]
      hits += [wanted in best[:k] for k in calibrate.WIDTHS]
      rows += 1
    assert rows > 5
    np.testing.assert_allclose(got[str(strength)], hits / rows, atol=1e-4)


def test_best_strength_by_width():
  measured = {"0.0": [0.3, 0.6, 0.7], "0.5": [0.4, 0.5, 0.7]}
  assert calibrate.best(measured, 1) == 0.5
  assert calibrate.best(measured, 4) == 0.0


def test_strength_is_written_and_read(tmp_path):
  target = tiny.target()
  made = tiny.drafter(target)
  folder = tmp_path / "d"
  drafters.save(
    folder,
    made.config,
    made.params,
    made.vocabulary,
    False,
    {},
    "float32",
  )
  calibrate.write(folder, 0.25, {"temperature": 1.0})
  raw = json.loads((folder / "config.json").read_text())
  assert raw["eagle_jax"]["calibration"] == {"temperature": 1.0}
  again = drafters.load(folder, target.config, target.params)
  assert again.config.draft_noise == pytest.approx(0.25)


def test_prompts_end_where_the_first_answer_begins():
  #             document 1 | 2, cut before its answer | 3, two answers
  documents = [1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 0]
  mask = [0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0]
  packed = {
    "tokens": np.arange(12)[None],
    "mask": np.asarray(mask, bool)[None],
    "documents": np.asarray(documents)[None],
  }
  assert calibrate.prompts_of(packed, 9) == [[0, 1], [6]]
  assert calibrate.prompts_of(packed, 1) == [[0, 1]]


def test_the_command_writes_strength_and_acceptance(
  tmp_path, monkeypatch, capsys
):
  folders.share_programs(monkeypatch)
  monkeypatch.setattr(calibrate, "LENGTH", 24)
  pair = folders.pair(tmp_path)
  chats = tmp_path / "heldout.jsonl"
  turn = lambda role, text: {"role": role, "content": text}
  rows = [
    {"messages": [turn("user", "count"), turn("assistant", "one two " * n)]}
    for n in (4, 6, 8)
  ]
  chats.write_text("\n".join(map(json.dumps, rows)))
  given = {
    "target": pair.target,
    "drafter": pair.drafter,
    "data": str(chats),
    "temperature": 0.8,
    "max_bad_rows": 0,
    "rows": 2,
    "row_length": 64,
    "width": 4,
    "answers": 3,
    "seed": 0,
  }
  run = lambda **f: calibrate._run(types.SimpleNamespace(**given | f))
  with refused("temperature 0", "answers 3"):
    run(temperature=0.0)
  with refused("answers 0"):
    run(answers=0)
  run()
  said = capsys.readouterr().out
  folder = pathlib.Path(pair.drafter)
  target = loading.load_target(pair.target, "float32", print)
  drafter = loading.load_drafter(pair.drafter, target, print)
  saved = json.loads((folder / "acceptance.json").read_text())
  assert saved["sampled"]["temperature"] == 0.8
  assert saved["sampled"]["draft_noise"] == drafter.config.draft_noise
  assert saved["contexts"] > 0 < saved["sampled"]["contexts"]
  assert f"acceptance of {saved['contexts']} greedy" in said
  cold, warm = (
    choice.taus_of(target, drafter, Sampling(t), None) for t in (0.0, 0.8)
  )
  assert cold == saved["tau"]
  assert warm == pytest.approx(saved["sampled"]["tau"])
