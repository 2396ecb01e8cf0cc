"""Replay gives the accept lengths of real decoding, without verifying."""

import types

import engines
import numpy as np
import pytest
import tiny

from eagle_jax import Sampling, generation, loading
from eagle_jax.bench import replay
from eagle_jax.speculation import tree
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request

SPECS = {"dynamic": engines.DYNAMIC, "chain": tree.chain(2)}


def draftings(drafter) -> dict[str, replay.Drafting]:
  return {n: replay.Drafting(drafter, spec) for n, spec in SPECS.items()}


@pytest.mark.parametrize("window", [None, 4])
def test_accept_lengths_are_those_of_decoding(window, monkeypatch):
  monkeypatch.setattr(replay, "READ_TOKENS", 4)  # prompts of 5, 8 and 11
  target = engines.target()
  drafter = tiny.drafter(target, sliding_window=window)
  requests = [
    Request(engines.prompt(i, 5 + 3 * i), 30, s, seed=4, number=i)
    for i, s in enumerate(
      [Sampling(), Sampling(1.0, draft_noise=0.5), Sampling(0.7, top_k=9)]
    )
  ]
  plain = Engine(loading.models(target, None, tree.plain()), 3, None)
  known = replay.Known(
    requests, [r.token_ids for r in plain.generate(requests)]
  )
  got = replay.replay(target, draftings(drafter), known, batch_size=2)
  for name, spec in SPECS.items():
    engine = Engine(loading.models(target, drafter, spec), 3, None)
    real = engine.generate(requests)
    assert sum(sum(r.accept_lengths) for r in real) > 3
    for row, result in zip(got[name], real, strict=True):
      assert row.tokens == result.token_ids
      assert row.accept_lengths == result.accept_lengths


def test_drafters_and_strengths_side_by_side_are_those_alone(monkeypatch):
  """One reading serves drafters that read the same layers, and no other."""
  target = engines.target()
  requests = [
    Request(engines.prompt(i, 6), 30, Sampling(1.0, draft_noise=0.25), 4, i)
    for i in range(3)
  ]
  plain = Engine(loading.models(target, None, tree.plain()), 3, None)
  known = replay.Known(
    requests, [r.token_ids for r in plain.generate(requests)]
  )
  spec = engines.DYNAMIC
  drafters = {
    "eagle": tiny.drafter(target, "eagle"),
    "eagle3": tiny.drafter(target),
    "other layers": tiny.drafter(target, taps=(0, 1, 2)),
  }
  assert drafters["eagle3"].config.taps != (0, 1, 2)
  together = {
    (kind, noise): replay.Drafting(drafter, spec, noise)
    for kind, drafter in drafters.items()
    for noise in (None, 0.0, 0.25, 1.0)
  }
  readings, read = [], replay.read
  monkeypatch.setattr(
    replay, "read", lambda m, *a: readings.append(m) or read(m, *a)
  )
  got = replay.replay(target, together, known, 3)
  assert len(readings) == 3
  lengths = {}
  for key, d in together.items():
    noise = d.draft_noise
    asked = requests
    if noise is not None:
      asked = [replay.drawn_with(r, noise) for r in requests]
    engine = Engine(loading.models(target, d.drafter, spec), 3, None)
    lengths[key] = [r.accept_lengths for r in got[key]]
    assert lengths[key] == [r.accept_lengths for r in engine.generate(asked)]
  assert lengths["eagle", None] == lengths["eagle", 0.25]
  assert lengths["eagle", 0.0] != lengths["eagle", 1.0]
  assert lengths["eagle", 0.0] != lengths["eagle3", 0.0]


def test_earlier_turns_fill_a_prompt_with_whole_chats(monkeypatch):
  count = lambda tokenizer, messages: (
    [0] * sum(len(m["content"].split()) for m in messages)
  )
  monkeypatch.setattr(replay.text, "encode_messages", count)
  target = types.SimpleNamespace(tokenizer=None)
  chat = lambda n: [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a " * (n - 1)},
  ]
  question = replay.suites.Question(7, "", ("one two three",))
  turns = lambda tokens, *sizes: replay.earlier_turns(
    target, [chat(n) for n in sizes], question, tokens
  )
  assert turns(2, 4) == []  # the question itself is longer
  assert turns(16, 4, 9, 5) == chat(4) + chat(9)  # 16 in all
  assert turns(15, 4, 9, 5) == chat(4)
  assert turns(99, 4, 9, 5) == chat(4) + chat(9) + chat(5)
  assert replay.rotated([1, 2, 3], 4) == [2, 3, 1]
  request = replay.first_turn(target, question, Sampling(), 8, 0, chat(4))
  assert len(request.prompt_ids) == 7


def test_answers_are_kept_and_keyed_by_what_made_them(tmp_path, monkeypatch):
  target = engines.target()
  monkeypatch.setattr(
    replay.text, "encode_messages", lambda tokenizer, m: [1, 2, 3]
  )
  question = replay.suites.Question(7, "", ("x",))
  make = lambda s: replay.plain_answers(
    target, [question], s, 8, 0, 1, tmp_path
  )
  first = make(Sampling())
  assert make(Sampling(draft_noise=0.5)).answers == first.answers
  assert len(list(tmp_path.iterdir())) == 1  # noise makes no new answer
  make(Sampling(1.0))
  assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
  ("name", "want"),
  [
    ("dynamic:9:3:2", tree.dynamic(9, 3, 2)),
    ("static", tree.eagle1()),
    ("chain::4", tree.chain(4)),
    ("uniform:7::2", tree.uniform(7, 2)),
  ],
)
def test_tree_names(name, want):
  assert generation.named_tree(name) == want


@pytest.mark.parametrize(
  "name",
  [
    "oak",
    "dynamic:x",
    "dynamic:2:6:1",
    "a:b:c:d:e",
    "chain:1:1:1:1",
    "chain:²",
  ],
)
def test_bad_tree_names(name):
  with pytest.raises(replay.InputError, match=name):
    generation.named_tree(name)


def test_a_tau_of_no_cycles_is_a_dash():
  known = {"tau": 1.25, "tau_without_loops": None}
  line = replay._line("gsm8k", "chain::1", known)
  words = " ".join(line.split())
  assert words == "gsm8k chain::1 tau 1.250, without loops -"


def test_damaged_answers_are_named(tmp_path, monkeypatch):
  target = engines.target()
  monkeypatch.setattr(
    replay.text, "encode_messages", lambda tokenizer, m: [1, 2, 3]
  )
  question = replay.suites.Question(7, "", ("x",))
  make = lambda: replay.plain_answers(
    target, [question], Sampling(), 8, 0, 1, tmp_path
  )
  answers = make().answers
  (file,) = tmp_path.iterdir()
  file.write_text(file.read_text()[:5])
  with pytest.raises(replay.InputError, match=f"{file.name} is damaged"):
    make()
  file.unlink()
  assert make().answers == answers


def test_known_tokens_end_a_replay_exactly():
  """No cycle runs past the answer, however deep the tree."""
  target = engines.target()
  drafter = tiny.drafter(target)
  known = replay.Known([Request([3, 1], 5)], [[4, 4, 4, 4, 4]])
  row = replay.replay(target, draftings(drafter), known, 1)["chain"][0]
  assert sum(a + 1 for a in row.accept_lengths) == len(row.tokens) - 1
  assert np.max(row.accept_lengths) <= 2
