"""Drafting never changes the answer: token for token that of plain decoding.

Plain decoding itself is held against recomputing everything each step.
"""

import functools
import itertools

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_sampling import DEFAULTS, twin

from eagle_jax import Sampling, loading
from eagle_jax.models import layers, masks
from eagle_jax.speculation import sampling, tree
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request

TREES = {
  "dynamic": engines.DYNAMIC,
  "static": tree.eagle1(),
  "uniform": tree.uniform(6, 2),
  "chain": tree.chain(2),
}
SETTINGS = [
  {},
  {},
  {},
  {"repetition_penalty": 1.3},
  {"temperature": 1.0},
  {"temperature": 1.0, "draft_noise": 0.5},
  {"temperature": 1.0, "draft_noise": 1.0},
  {"temperature": 0.5, "top_k": 5, "draft_noise": 0.5},
  {"temperature": 0.3, "top_p": 0.8, "draft_noise": 1.0},
  {"temperature": 1.0, "min_p": 0.1, "draft_noise": 1.0},
  {"temperature": 0.7, "repetition_penalty": 1.3, "draft_noise": 0.5},
  {
    "temperature": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "draft_noise": 0.5,
  },
]
# every prompt has another length, and every three a new seed
REQUESTS = [
  Request(engines.prompt(i, 1 + 2 * i), 22 - i, Sampling(**s), i // 3, i)
  for i, s in enumerate(SETTINGS)
]
CASES = list(itertools.product(("eagle", "eagle3"), TREES))


@pytest.fixture(scope="module")
def plain():
  return engines.build(None)


@pytest.fixture(scope="module")
def answers(plain):
  return plain.generate(REQUESTS)


@jax.jit
def _last_logits(m, tokens, last):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  attend = masks.Attend(own=masks.Causal())
  run = functools.partial(m.target.apply, {"params": m.target_params})
  out, _ = run(tokens, positions, attend, None)
  every = jnp.arange(len(last))
  return run(out.feature[every, last], method="logits")


def last_logits(m, sequences):
  """float32[n, V] after each sequence, all recomputed, no cache."""
  tokens = np.zeros((16, 64), np.int32)
  for row, ids in enumerate(sequences):
    tokens[row, : len(ids)] = ids
  last = np.asarray([len(ids) - 1 for ids in sequences])
  last = np.pad(last, (0, 16 - len(sequences)))
  return np.asarray(_last_logits(m, tokens, last))[: len(sequences)]


def test_plain_decoding_is_recomputing_everything(plain, answers):
  rows = [list(r.prompt_ids) for r in REQUESTS]
  keys = [sampling.row_seed(r.seed, r.number, r.sample) for r in REQUESTS]
  gumbel = jax.jit(sampling.gumbel, static_argnums=2)
  for _ in range(max(r.max_new_tokens for r in REQUESTS)):
    x = last_logits(plain.models, rows)
    at = np.asarray([len(ids) for ids in rows])
    noise = np.asarray(gumbel(np.stack(keys), at, tiny.V))
    for i, (ids, r) in enumerate(zip(rows, REQUESTS, strict=True)):
      s = {name: getattr(r.sampling, name) for name in DEFAULTS}
      warm = s["temperature"] > 0
      seen = np.isin(np.arange(tiny.V), ids)
      scores = twin(x[i], seen, s if warm else s | {"temperature": 1.0})
      ids.append(int((scores + warm * noise[i]).argmax()))
  for ids, r, answer in zip(rows, REQUESTS, answers, strict=True):
    n = len(r.prompt_ids)
    assert ids[n : n + r.max_new_tokens] == answer.token_ids, r.sampling
    assert answer.accept_lengths == [0] * (r.max_new_tokens - 1)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_tree_and_drafter_gives_the_plain_tokens(
  plain, answers, kind, name
):
  engine = engines.build(kind, TREES[name])
  got = engine.generate(REQUESTS)
  engines.check_equal(plain, REQUESTS, answers, got)
  for result in got:
    engines.check_counts(result)
  # something was accepted, or nothing was tested
  assert sum(sum(r.accept_lengths) for r in got) > 0
  assert max(max(r.accept_lengths) for r in got) <= engine.models.spec.levels


def test_a_row_alone_or_in_another_slot_gives_the_same_tokens(plain, answers):
  engine = engines.build("eagle3")
  backwards = engine.generate(REQUESTS[::-1])[::-1]
  engines.check_equal(plain, REQUESTS, answers, backwards)
  alone = engines.build("eagle3", B=1).generate(REQUESTS)
  engines.check_equal(plain, REQUESTS, answers, alone)
  together = engine.generate(REQUESTS)
  for a, b, c in zip(alone, backwards, together, strict=True):
    assert a.token_ids == b.token_ids == c.token_ids
    assert a.accept_lengths == b.accept_lengths == c.accept_lengths


def test_a_batch_that_is_not_full_gives_the_same_tokens(answers):
  got = engines.build("eagle3").generate(REQUESTS[4:8])
  assert [r.token_ids for r in got] == [r.token_ids for r in answers[4:8]]


def test_the_head_may_read_all_nodes_or_only_the_visited(plain, answers):
  eager = engines.build("eagle3", lazy_head=False)
  assert not eager.models.lazy_head
  got = eager.generate(REQUESTS)
  engines.check_equal(plain, REQUESTS, answers, got)


def test_a_wide_head_in_blocks_gives_the_same_tokens(
  plain, answers, monkeypatch
):
  """As loading lays out a real vocabulary on a CPU, here in two blocks."""
  monkeypatch.setattr(loading, "WIDE_HEAD", tiny.V - 1)
  monkeypatch.setattr(layers, "HEAD_BLOCK", tiny.V // 2 + 1)
  t = tiny.target()  # its own: what it caches is cut here
  few = tree.dynamic(loading.FEW_NODES, 3, 2)
  m = loading.models(t, tiny.drafter(t, "eagle3"), few)
  assert m.target.on_cpu
  assert not m.lazy_head
  assert len(m.target_params["head_blocks"]) == 2
  assert m.drafter.on_cpu
  assert "qkv_proj" in m.drafter_params["self_attn"]
  more = loading.models(t, None, tree.dynamic(loading.FEW_NODES + 1, 3, 2))
  assert more.lazy_head
  got = Engine(m, 3, None).generate(REQUESTS)
  engines.check_equal(plain, REQUESTS, answers, got)


def test_end_ids_cut_both_ways_alike(plain, answers):
  """Every request ends at an id of its own answer, given as a list."""
  ends = tuple({r.token_ids[6] for r in answers})
  ours = engines.with_ends(engines.build("eagle3"), ends).generate(REQUESTS)
  theirs = engines.with_ends(plain, ends).generate(REQUESTS)
  for whole, a, b in zip(answers, theirs, ours, strict=True):
    first = next(i for i, t in enumerate(whole.token_ids) if t in ends)
    assert a.token_ids == b.token_ids == whole.token_ids[: first + 1]
    assert b.finish_reason == "stop"
    engines.check_counts(b)


def test_a_sliding_window_is_the_same_in_a_tree(answers):
  window = {"layers": 2, "window": 5}
  plain = engines.build(None, **window)
  expected = plain.generate(REQUESTS)
  got = engines.build("eagle", **window).generate(REQUESTS)
  engines.check_equal(plain, REQUESTS, expected, got)
  wide = engines.build(None, layers=2).generate(REQUESTS)
  assert [r.token_ids for r in wide] != [r.token_ids for r in expected]


def test_experts_are_the_same_in_a_tree():
  """Tokens beside a token do not change which experts it goes through."""
  experts = (("num_experts", 4), ("experts_per_token", 2))
  plain = engines.build(None, layers=2, experts=experts)
  expected = plain.generate(REQUESTS)
  got = engines.build("eagle", layers=2, experts=experts).generate(REQUESTS)
  engines.check_equal(plain, REQUESTS, expected, got)
  assert sum(sum(r.accept_lengths) for r in got) > 0


@pytest.mark.parametrize("variant", [v for v in tiny.VARIANTS if v != "plain"])
def test_every_eagle3_variant_gives_the_plain_tokens(variant):
  plain = engines.build(None, layers=2).generate(REQUESTS)
  engine = engines.build("eagle3", layers=2, variant=variant)
  got = engine.generate(REQUESTS)
  engines.check_equal(engine, REQUESTS, plain, got)
  assert sum(sum(r.accept_lengths) for r in got) > 0


def test_the_answers_follow_the_exact_distribution():
  """The second witness: chi-square of three tokens over fixed seeds."""
  engine = engines.build("eagle", tree.dynamic(6, 2, 3), B=64, layers=2)
  ids, k, samples = engines.prompt(9, 4), 3, 1024
  s = Sampling(temperature=1.5, top_k=k, draft_noise=0.5)
  got = engine.generate([Request(ids, 3, s, 7, 0, i) for i in range(samples)])
  expected = {(): 1.0}
  for step in range(3):
    prefixes = list(expected)
    x = last_logits(engine.models, [[*ids, *p] for p in prefixes])
    for p, row in zip(prefixes, x, strict=True):
      mass = expected.pop(p)
      best = np.argsort(-row)[:k]
      q = np.exp((row[best] - row[best[0]]).astype(np.float64) / 1.5)
      expected |= {
        (*p, int(t)): mass * w for t, w in zip(best, q / q.sum(), strict=True)
      }
    assert len(expected) == k ** (step + 1)
  counts = dict.fromkeys(expected, 0)
  for r in got:
    counts[tuple(r.token_ids)] += 1
  e = np.asarray(list(expected.values())) * samples
  n = np.asarray(list(counts.values()))
  big = e >= 4  # the rare ones together
  e = np.append(e[big], e[~big].sum() + 1e-9)
  n = np.append(n[big], n[~big].sum())
  chi, dof = float(((n - e) ** 2 / e).sum()), len(e) - 1
  assert dof >= 5
  assert chi < dof + 4 * np.sqrt(2 * dof)
  assert sum(sum(r.accept_lengths) for r in got) > 50
