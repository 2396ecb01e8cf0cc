"""The decision rule against a plain numpy twin, and its noise as a draw."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import Sampling
from eagle_jax.errors import InputError
from eagle_jax.speculation import sampling
from eagle_jax.speculation.sampling import SamplingParams

V = 37
DEFAULTS = {
  "temperature": 1.0,
  "top_k": 0,
  "top_p": 1.0,
  "min_p": 0.0,
  "repetition_penalty": 1.0,
  "draft_noise": 0.0,
}
process = jax.jit(sampling.process)
next_token = jax.jit(sampling.next_token)
gumbel = jax.jit(sampling.gumbel, static_argnums=2)


def params(*rows):
  """One dict of settings a row."""
  types = {"top_k": np.int32}
  return SamplingParams(
    **{
      name: np.asarray(
        [DEFAULTS[name] if name not in r else r[name] for r in rows],
        types.get(name, np.float32),
      )
      for name in DEFAULTS
    }
  )


def twin(logits, seen, s):
  """transformers' processors in its order, by sorting (float64)."""
  x = logits.astype(np.float64)
  p = s["repetition_penalty"]
  x = np.where(seen, np.where(x < 0, x * p, x / p), x) / s["temperature"]
  if s["top_k"]:
    x[x < np.sort(x)[-min(s["top_k"], x.size)]] = -np.inf
  if s["top_p"] < 1:
    order = np.argsort(x)
    q = np.exp(x - x.max())
    below = np.cumsum(q[order]) / q.sum()
    drop = below <= 1 - s["top_p"]
    drop[-1] = False
    x[order[drop]] = -np.inf
  if s["min_p"]:
    x[np.exp(x - x.max()) < s["min_p"]] = -np.inf
  return x


MIXES = [
  {},
  {"temperature": 0.3},
  {"temperature": 1.7},
  {"top_k": 1},
  {"top_k": 5},
  {"top_k": 500},
  {"top_p": 0.5},
  {"top_p": 0.97},
  {"top_p": 1e-6},
  {"min_p": 0.1},
  {"min_p": 0.9},
  {"repetition_penalty": 1.3},
  {"repetition_penalty": 0.7, "temperature": 0.8},
  {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
  {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
  {
    "temperature": 0.9,
    "top_k": 12,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
  },
]


def test_process_matches_transformers_order():
  """All settings in one batch: a row's processors do not touch the others."""
  settings = [DEFAULTS | m for m in MIXES]
  for trial in range(6):
    rng = np.random.default_rng(trial)
    logits = rng.normal(0, 3, (len(MIXES), V)).astype(np.float32)
    seen = rng.random(logits.shape) < 0.3
    got = np.asarray(process(logits, seen, params(*MIXES)))
    for row, s in enumerate(settings):
      want = twin(logits[row], seen[row], s)
      assert (got[row] > -np.inf).tolist() == (want > -np.inf).tolist(), s
      kept = want > -np.inf
      np.testing.assert_allclose(got[row][kept], want[kept], rtol=2e-6)


def test_a_setting_alone_is_the_same_as_in_a_batch():
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (len(MIXES), V)).astype(np.float32)
  seen = rng.random(logits.shape) < 0.3
  together = np.asarray(process(logits, seen, params(*MIXES)))
  for row, mix in enumerate(MIXES):
    one = slice(row, row + 1)
    alone = np.asarray(process(logits[one], seen[one], params(mix)))
    assert alone[0].tolist() == together[row].tolist()


def test_ties_at_a_threshold_are_all_kept():
  x = np.asarray([[3, 1, 3, 2, 2, 0, -1, 2]], np.float32)
  none = np.zeros(x.shape, bool)
  kept = lambda **s: np.flatnonzero(
    np.asarray(process(x, none, params(s)))[0] > -np.inf
  ).tolist()
  assert kept(top_k=1) == [0, 2]
  assert kept(top_k=2) == [0, 2]
  assert kept(top_k=3) == [0, 2, 3, 4, 7]
  assert kept(top_k=6) == [0, 1, 2, 3, 4, 7]
  assert kept(top_k=8) == list(range(8))
  assert kept(top_p=0.01) == [0, 2]
  # min_p = e^-1 exactly on the second best
  assert kept(min_p=float(np.exp(-1)) * 0.999) == [0, 2, 3, 4, 7]
  assert kept(min_p=float(np.exp(-1)) * 1.001) == [0, 2]


def test_top_p_edge_is_the_smallest_set_that_reaches_it():
  probs = np.asarray([[0.5, 0.25, 0.125, 0.125]], np.float32)
  none = np.zeros(probs.shape, bool)
  kept = lambda p: int(
    np.sum(
      np.asarray(process(np.log(probs), none, params({"top_p": p}))) > -np.inf
    )
  )
  assert [kept(p) for p in (0.1, 0.49, 0.51, 0.74, 0.76)] == [1, 1, 2, 2, 4]


def test_sortable_keeps_the_order_of_floats():
  x = np.asarray([-np.inf, -3e38, -1.5, -1e-30, 0, 1e-30, 2, np.inf])
  keys = np.asarray(sampling._sortable(jnp.asarray(x, jnp.float32)))
  assert (np.diff(keys.astype(np.uint64).astype(np.int64)) > 0).all()


def test_greedy_is_argmax_whatever_the_cuts():
  rng = np.random.default_rng(3)
  logits = rng.normal(size=(4, V)).astype(np.float32)
  logits[1, [4, 9]] = 7.0  # a tie: the lower id
  seen = np.ones(logits.shape, bool)
  rows = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.0, "top_p": 0.1, "min_p": 0.5},
    {"temperature": 1.0},  # makes the batch take the sampling path
  ]
  seeds = np.zeros((4, 2), np.uint32)
  for mixed in (rows, [rows[0]] * 4):
    got = next_token(logits, seen, params(*mixed), seeds, np.arange(4))
    assert got[:3].tolist() == logits.argmax(-1)[:3].tolist()


def test_greedy_penalty_counts_a_seen_id_once():
  logits = np.asarray([[2.0, 1.9, -1.0], [-2.0, -1.9, -9.0]], np.float32)
  seen = np.asarray([[True, False, False], [False, True, False]])
  s = params(*[{"temperature": 0.0, "repetition_penalty": 1.2}] * 2)
  got = next_token(
    logits, seen, s, np.zeros((2, 2), np.uint32), np.zeros(2, int)
  )
  assert got.tolist() == [1, 0]


def test_noise_depends_on_seed_and_position_only():
  seeds = np.asarray([[1, 2], [3, 4], [1, 2], [1, 2]], np.uint32)
  positions = np.asarray([5, 5, 6, 5], np.int32)
  together = np.asarray(gumbel(seeds, positions, V))
  for b in range(4):
    one = slice(b, b + 1)
    alone = np.asarray(gumbel(seeds[one], positions[one], V))
    assert alone[0].tolist() == together[b].tolist()
  assert together[0].tolist() == together[3].tolist()
  assert not np.allclose(together[0], together[1])
  assert not np.allclose(together[0], together[2])


def test_row_seeds_differ_by_seed_request_and_sample():
  found = {
    tuple(np.asarray(sampling.row_seed(*key)).tolist())
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
  }
  assert len(found) == 5


@pytest.mark.parametrize(
  "setting", [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.7}]
)
def test_next_token_draws_from_the_softmax(setting):
  """Chi-square over fixed seeds, half of the draws by position."""
  rows = 12000
  rng = np.random.default_rng(5)
  logits = rng.normal(0, 1.2, 12).astype(np.float32)
  seeds = np.zeros((rows, 2), np.uint32)
  seeds[:, 1] = np.arange(rows) // 2
  got = next_token(
    np.tile(logits, (rows, 1)),
    np.zeros((rows, 12), bool),
    params(*[setting] * rows),
    seeds,
    np.arange(rows) % 2 + 40,
  )
  x = twin(logits, np.zeros(12, bool), DEFAULTS | setting)
  expected = np.exp(x - x.max()) / np.exp(x - x.max()).sum() * rows
  counts = np.bincount(np.asarray(got), minlength=12)
  kept = expected > 0
  assert counts[~kept].sum() == 0
  chi = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
  dof = kept.sum() - 1
  assert chi < dof + 4 * np.sqrt(2 * dof)  # about 4 sigma


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_children_without_noise_are_the_most_probable(temperature):
  rng = np.random.default_rng(6)
  B, T, W, branch = 2, 3, 20, 5
  logits = rng.normal(size=(B, T, W)).astype(np.float32)
  vocabulary = np.sort(rng.permutation(100)[:W]).astype(np.int32)
  noise = rng.gumbel(size=(B, W)).astype(np.float32)
  tokens, scores = sampling.draft_children(
    jnp.asarray(logits),
    branch,
    jnp.asarray(vocabulary),
    params(*[{"temperature": temperature, "draft_noise": 0.0}] * B),
    jnp.asarray(noise),
  )
  x = logits.astype(np.float64) / (temperature or 1)
  logq = x - np.log(np.exp(x).sum(-1, keepdims=True))
  order = np.argsort(-logq, -1)[..., :branch]
  assert tokens.tolist() == vocabulary[order].tolist()
  want = np.take_along_axis(logq, order, -1)
  np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-6)


def test_children_with_noise_follow_the_targets_dice():
  """Drafter == target and strength 1: the first child is the target's token.

  A greedy row in the same batch stays without noise."""
  rng = np.random.default_rng(7)
  B, W = 40, 30
  logits = rng.normal(0, 2, (B, W)).astype(np.float32)
  seeds = rng.integers(0, 2**32, (B, 2)).astype(np.uint32)
  at = np.arange(B, dtype=np.int32)
  rows = [{"temperature": 0.8, "draft_noise": 1.0}] * (B - 1)
  s = params(*rows, {"temperature": 0.0, "draft_noise": 1.0})
  tokens, scores = sampling.draft_children(
    jnp.asarray(logits)[:, None],
    3,
    jnp.arange(W),
    s,
    gumbel(seeds, at, W),
  )
  want = next_token(logits, np.zeros((B, W), bool), s, seeds, at)
  assert tokens[:, 0, 0].tolist() == want.tolist()
  assert (np.diff(scores, axis=-1) <= 0).all()
  assert (np.asarray(scores) <= 0).all()
  plain = logits[:-1].argmax(-1)
  assert (np.asarray(want)[:-1] != plain).any()


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", 1.0),
    ("min_p", -0.1),
    ("repetition_penalty", 0.0),
    ("draft_noise", 1.1),
  ],
)
def test_impossible_settings_are_refused_by_name(field, value):
  with pytest.raises(InputError, match=f"{field} {value}"):
    Sampling(**{field: value})


def test_every_sampling_field_reaches_the_rule():
  names = {f.name for f in dataclasses.fields(Sampling)}
  assert names == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("W", [16384, 32000, 49152, 20001])
@pytest.mark.parametrize("distinct", [5, 300, 10**6])
def test_top_k_of_wide_rows(W, distinct):
  """Value for value and tie for tie what a stable sort gives."""
  x = np.random.default_rng(W).integers(0, distinct, (2, W)).astype(np.float32)
  best, at = sampling.top_k(jnp.asarray(x), 10)
  expected = np.argsort(-x, axis=-1, kind="stable")[:, :10]
  np.testing.assert_array_equal(at, expected)
  np.testing.assert_array_equal(best, np.take_along_axis(x, expected, -1))
