"""The walk against a loop over one row in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.speculation import sampling, tree
from eagle_jax.speculation.sampling import SamplingParams
from eagle_jax.speculation.verify import walk

B, M, L, V = 6, 10, 4, 7
next_token = jax.jit(sampling.next_token)


def random_tree(rng):
  """Parents first, siblings with different tokens, levels up to L."""
  parent = np.zeros((B, M), np.int32)
  level = np.zeros((B, M), np.int32)
  tokens = rng.integers(0, V, (B, M)).astype(np.int32)
  for b in range(B):
    for i in range(1, M):
      open_nodes = [
        j
        for j in range(i)
        if level[b, j] < L and np.sum(parent[b, 1:i] == j) < V - 1
      ]
      parent[b, i] = p = rng.choice(open_nodes)
      level[b, i] = level[b, p] + 1
      used = {int(tokens[b, j]) for j in range(1, i) if parent[b, j] == p}
      tokens[b, i] = rng.choice([t for t in range(V) if t not in used])
  valid = rng.random((B, M)) < 0.85
  valid[:, 0] = True
  return tree.Tree(
    tokens=jnp.asarray(tokens),
    parent=jnp.asarray(parent),
    level=jnp.asarray(level),
    scores=jnp.zeros((B, M)),
    valid=jnp.asarray(valid),
    ancestors=tree.ancestors(jnp.asarray(parent), L),
  )


def twin_walk(t, b, decide, room, ends, seen):
  """Path, tokens, seen and whether an end id came, of one row."""
  node, path, tokens, seen = 0, [0], [], seen.copy()
  while True:
    token = decide(node, seen, len(path))
    tokens.append(token)
    seen[token] = True
    if ends[token] or len(tokens) == room or len(tokens) == L + 1:
      return path, tokens, seen, ends[token]
    children = [
      i
      for i in range(1, M)
      if t.parent[b, i] == node and t.tokens[b, i] == token and t.valid[b, i]
    ]
    if not children:
      return path, tokens, seen, False
    node = children[0]
    path.append(node)


def params_of(**columns):
  base = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "draft_noise": 0.0,
  }
  return SamplingParams(
    **{
      f.name: jnp.broadcast_to(
        jnp.asarray(columns.get(f.name, base[f.name])), (B,)
      )
      for f in dataclasses.fields(SamplingParams)
    }
  )


def decision(logits, params, seeds, position, node, seen, step):
  """The target's token after one node of one row."""
  return int(
    next_token(logits[:, node], seen[None], params, seeds, position + step)[0]
  )


@jax.jit
def run_walk(t, logits, seen, params, seeds, position, room, ends, live):
  at = lambda node: jnp.take_along_axis(logits, node[:, None, None], 1)[:, 0]
  return walk(t, L, at, seen, params, seeds, position, room, ends, live)


@pytest.mark.parametrize(
  "settings",
  [
    {},
    {"repetition_penalty": 2.0},
    {"temperature": 1.0, "top_k": 4, "repetition_penalty": 1.5},
  ],
)
def test_walk_matches_the_loop(settings):
  params = params_of(**settings)
  one = jax.tree.map(lambda a: a[:1], params)
  lengths, cut_by_room, cut_by_end = set(), 0, 0
  for trial in range(12):
    rng = np.random.default_rng(trial)
    t = random_tree(rng)
    # lean towards the drafted children, or nothing would be accepted
    logits = rng.normal(size=(B, M, V)).astype(np.float32)
    for b in range(B):
      for i in range(1, M):
        logits[b, t.parent[b, i], t.tokens[b, i]] += 2.0
    ends = np.arange(V) == (trial % 8)
    seen = rng.random((B, V)) < 0.3
    seeds = rng.integers(0, 2**32, (B, 2)).astype(np.uint32)
    position = rng.integers(3, 50, B).astype(np.int32)
    room = rng.integers(1, L + 3, B).astype(np.int32)
    live = rng.random(B) < 0.8
    got = jax.device_get(
      run_walk(t, logits, seen, params, seeds, position, room, ends, live)
    )
    for b in range(B):
      if not live[b]:
        assert got.length[b] == 0
        assert not got.ended[b]
        assert (got.seen[b] == seen[b]).all()
        continue

      row = slice(b, b + 1)
      decide = functools.partial(
        decision, logits[row], one, seeds[row], position[row]
      )
      path, tokens, seen_after, ended = twin_walk(
        t, b, decide, room[b], ends, seen[b]
      )
      a = int(got.length[b])
      assert a == len(path) - 1
      assert got.path[b, : a + 1].tolist() == path
      assert got.tokens[b, : a + 1].tolist() == tokens
      assert got.seen[b].tolist() == seen_after.tolist()
      assert bool(got.ended[b]) == bool(ended)
      lengths.add(a)
      cut_by_room += len(tokens) == room[b]
      cut_by_end += bool(ended)
  # the cases really came up
  assert {0, 1, 2} <= lengths
  assert cut_by_room > 0
  assert cut_by_end > 0


def test_a_node_is_visited_at_most_once_a_step():
  """logits_at is asked for all rows together, at most L + 1 times."""
  t = random_tree(np.random.default_rng(0))
  asked = []
  logits = np.random.default_rng(1).normal(size=(B, M, V)).astype(np.float32)

  def at(node):
    asked.append(np.asarray(node))
    return jnp.asarray(logits[np.arange(B), asked[-1]])

  with jax.disable_jit():
    got = walk(
      t,
      L,
      at,
      jnp.zeros((B, V), bool),
      params_of(),
      jnp.zeros((B, 2), jnp.uint32),
      jnp.zeros(B, jnp.int32),
      jnp.full(B, 99),
      jnp.zeros(V, bool),
      jnp.ones(B, bool),
    )
  assert len(asked) == 1 + int(got.length.max())
  assert (asked[0] == 0).all()
