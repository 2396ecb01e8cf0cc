"""One cycle, looked at from outside: trees, caches, rows, the program."""

import functools

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import Sampling
from eagle_jax.models import masks
from eagle_jax.speculation import decoding
from eagle_jax.speculation import state as states
from eagle_jax.speculation.requests import Request

KINDS = ("eagle", "eagle3")
PROMPTS = [engines.prompt(20 + i, n) for i, n in enumerate((9, 3, 14))]


def requests(new=20, **sampling):
  return [
    Request(p, new, Sampling(**sampling), 3, i) for i, p in enumerate(PROMPTS)
  ]


@jax.jit
def all_features(m, tokens):
  """What the drafter reads, of a whole sequence."""
  attend = masks.Attend(own=masks.Causal())
  positions = jnp.arange(tokens.shape[1])[None]
  out, _ = m.target.apply(
    {"params": m.target_params}, tokens, positions, attend, None
  )
  run = functools.partial(m.drafter.apply, {"params": m.drafter_params})
  return run(decoding.drafter_reads(m, out), method="fuse")


@jax.jit
def draft_alone(m, tokens, features):
  """Drafter outputs and log-probabilities of a sequence, no cache."""
  attend = masks.Attend(own=masks.Causal())
  run = functools.partial(m.drafter.apply, {"params": m.drafter_params})
  positions = jnp.arange(tokens.shape[1])[None]
  out, _ = run(tokens, features, positions, attend, None, None, ())
  return out, jax.nn.log_softmax(run(out, method="logits"))


def twin_score(m, ids, features, n, path):
  """log q of a path of tokens below the root ids[n]: one row at a time."""
  width, total = 32, 0.0
  tokens = np.zeros((1, width), np.int32)
  fed = np.zeros((1, width, features.shape[-1]), np.float32)
  tokens[0, :n], fed[0, :n] = ids[1 : n + 1], features[0, :n]
  vocabulary = m.vocabulary.tolist()
  for row, token in enumerate(path, start=n):
    out, logq = jax.device_get(draft_alone(m, tokens, fed))
    total += logq[0, row - 1, vocabulary.index(token)]
    tokens[0, row], fed[0, row] = token, out[0, row - 1]
  return total


@pytest.mark.parametrize("kind", KINDS)
def test_tree_scores_are_those_of_drafting_one_row_at_a_time(kind):
  engine = engines.build(kind)
  m = engine.models
  state = engines.prefilled(engine, requests(), [32])
  tree = jax.device_get(engine._program("grow", 256)(m, state))
  for b, ids in enumerate(PROMPTS):
    n = len(ids)
    padded = np.zeros((1, 32), np.int32)
    padded[0, :n] = ids
    features = np.asarray(all_features(m, padded))
    root = int(tree.tokens[b, 0])
    for node in range(1, m.spec.num_nodes):
      path, at = [], node
      while at:
        path.insert(0, int(tree.tokens[b, at]))
        at = tree.parent[b, at]
      want = twin_score(m, [*ids, root], features, n, path)
      assert tree.scores[b, node] == pytest.approx(want, abs=2e-5)
      assert tree.level[b, node] == len(path)
  assert (tree.level == m.spec.levels).any()


@pytest.mark.parametrize("kind", KINDS)
def test_caches_after_decoding_are_those_of_a_fresh_prefill(kind):
  """Accepted rows are the right ones and drafts leave nothing behind."""
  engine = engines.build(kind)
  state = engines.prefilled(engine, requests(100), [32])
  state, out = engine._program("chunk", 256)(engine.models, state, np.int32(4))
  assert out.accept_lengths.sum() > 0
  assert not state.finished.any()
  again = [
    Request(state.tokens[b, : state.length[b]].tolist(), 9) for b in range(3)
  ]
  fresh = engines.prefilled(engine, again, [32, 32])
  assert state.length.tolist() == fresh.length.tolist()
  for b, r in enumerate(again):
    n = len(r.prompt_ids)
    assert (
      state.tokens[b, : n + 1].tolist() == fresh.tokens[b, : n + 1].tolist()
    )
    for x, y in zip(
      committed(state, b, n), committed(fresh, b, n), strict=True
    ):
      np.testing.assert_allclose(x, y, atol=5e-5)
  assert state.child_tokens.tolist() == fresh.child_tokens.tolist()
  np.testing.assert_allclose(state.child_scores, fresh.child_scores, atol=1e-4)
  np.testing.assert_allclose(state.root_feature, fresh.root_feature, atol=1e-4)
  assert (state.seen == fresh.seen).all()


def committed(state, row: int, n: int) -> list[np.ndarray]:
  """Keys [K, H, n] and values [K, n, H] of a row's first n slots."""
  found = []
  for layer in (*state.cache, *state.draft_cache):
    found += [layer.k[row, :, :, :n], layer.v[row, :, :n]]
  return found


def test_prefill_in_chunks_is_prefill_in_one():
  engine = engines.build("eagle3")
  long = [
    Request(engines.prompt(30 + i, n), 5, Sampling(temperature=1.0), 1, i)
    for i, n in enumerate((70, 20, 64))
  ]
  one = engines.prefilled(engine, long, [128])
  parts = engines.prefilled(engine, long, [32, 32, 32])
  assert one.length.tolist() == parts.length.tolist() == [70, 20, 64]
  for b, n in enumerate((70, 20, 64)):
    assert one.tokens[b, : n + 1].tolist() == parts.tokens[b, : n + 1].tolist()
    for x, y in zip(committed(one, b, n), committed(parts, b, n), strict=True):
      np.testing.assert_allclose(x, y, atol=2e-5)
  assert one.child_tokens.tolist() == parts.child_tokens.tolist()
  assert (one.seen == parts.seen).all()


def test_finished_rows_keep_what_they_hold():
  engine = engines.build("eagle3")
  m = engine.models
  state = engines.prefilled(engine, requests(temperature=1.0), [32])
  state = state.replace(finished=jnp.asarray([False, True, False]))
  before = jax.device_get(state)
  state, out = engine._program("chunk", 256)(m, state, np.int32(3))
  after = jax.device_get(state)
  assert out.count[1] == out.cycles[1] == 0
  assert (out.count[jnp.asarray([0, 2])] >= 3).all()
  n = before.length[1]
  assert after.length[1] == n
  assert (after.tokens[1] == before.tokens[1]).all()
  assert (after.seen[1] == before.seen[1]).all()
  for x, y in zip(committed(before, 1, n), committed(after, 1, n), strict=True):
    assert (x == y).all()


def test_a_chunk_stops_after_the_cycles_asked_for():
  engine = engines.build("eagle3")
  state = engines.prefilled(engine, requests(), [32])
  n = state.length.tolist()
  tokens = []
  for most in (1, 2):
    state, out = engine._program("chunk", 256)(
      engine.models, state, np.int32(most)
    )
    assert out.cycles.tolist() == [most] * 3
    grown = np.asarray(state.length) - n
    n = state.length.tolist()
    assert grown.tolist() == out.count.tolist()
    sums = out.accept_lengths[:, :most].sum(1) + most
    assert sums.tolist() == out.count.tolist()
    tokens += out.tokens[0, : out.count[0]].tolist()
  whole = engine.generate(requests())[0].token_ids[1:]
  assert tokens == whole[: len(tokens)]


def primitives(jaxpr):
  """Names of all primitives, in all inner programs too."""
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for value in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from primitives(inner)


def test_the_chunk_never_talks_to_the_host():
  engine = engines.build("eagle3")
  m = engine.models
  state = states.init_state(m, 2, 64, 32)
  run = functools.partial(decoding.run_chunk, size=4)
  names = set(primitives(jax.make_jaxpr(run)(m, state, np.int32(4)).jaxpr))
  # the search does go inside the loop and the branches
  assert {"while", "cond", "dot_general", "top_k"} <= names
  bad = ("callback", "infeed", "outfeed", "debug", "io_")
  assert not [n for n in names if any(b in n for b in bad)]


def test_the_state_is_donated_in_earnest():
  """The caches come back in the memory they went in with."""
  engine = engines.build("eagle3")
  engine.generate(requests(new=2))
  state = jax.eval_shape(
    functools.partial(states.init_state, engine.models, 3, engine._width, 256)
  )
  held = sum(
    x.size * x.dtype.itemsize
    for x in jax.tree.leaves((state.cache, state.draft_cache))
  )
  for name in (("chunk", 256), ("prefill", 256, 32)):
    memory = engine.programs[name].memory_analysis()
    assert memory.alias_size_in_bytes >= held


def test_begin_marks_what_the_prompts_hold():
  engine = engines.build("eagle3")
  state = engines.prefilled(engine, requests(), [])
  for b, ids in enumerate(PROMPTS):
    assert set(np.flatnonzero(state.seen[b])) == set(ids)
    assert state.limit[b] == len(ids) + 20
  assert state.length.tolist() == [0, 0, 0]
  assert not state.finished.any()
