"""Draft trees against tables and a list-and-loop twin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import tree_spec
from eagle_jax.errors import InputError
from eagle_jax.speculation import tree

# FACTS section 6, word for word.
EAGLE1 = (
  "0 1 2 3 | 00 01 02 10 11 20 21 30 | 000 001 002 010 011 020 021 100"
  " | 0000 0001 0002 | 00000 00001"
)


def spec_paths(spec):
  """The rank path of every node, read back from a static spec's tables."""
  pool, rows = [], [()]
  for level in range(spec.levels):
    made = [(*r, rank) for r in rows for rank in range(spec.branch)]
    pool += made
    if level < spec.levels - 1:
      rows = [made[i] for i in spec.frontiers[level]]
  return [pool[i] for i in spec.nodes]


def test_eagle1_has_exactly_the_published_paths():
  expected = [tuple(map(int, p)) for p in EAGLE1.replace("|", " ").split()]
  spec = tree.eagle1()
  assert spec_paths(spec) == expected
  assert (spec.num_nodes, spec.levels, spec.branch) == (26, 5, 4)
  # expanded nodes: those that have children
  widths = [len({p[:-1] for p in expected if len(p) == n}) for n in range(2, 6)]
  assert list(spec.width) == widths


@pytest.mark.parametrize(("nodes", "branch"), [(2, 3), (8, 2), (14, 3), (6, 1)])
def test_uniform_fills_level_by_level(nodes, branch):
  paths = spec_paths(tree.uniform(nodes, branch))
  every = [()]
  for path in every:  # grows while it is read: breadth first
    every += [(*path, r) for r in range(branch)]
    if len(every) >= nodes:
      break
  assert paths == every[1:nodes]


@pytest.mark.parametrize("levels", [1, 4])
def test_chain_is_one_draft_a_level(levels):
  spec = tree.chain(levels)
  assert spec_paths(spec) == [(0,) * n for n in range(1, levels + 1)]
  assert (spec.num_nodes, spec.levels, spec.branch) == (levels + 1, levels, 1)


def random_levels(rng, spec, B, ends, steps):
  """A pool as a drafter would fill it; scores on a grid of `steps` (ties)."""
  V = ends.shape[0]
  score = lambda *shape: np.sort(
    -rng.integers(0, steps, shape).astype(np.float32) / 4, axis=-1
  )[..., ::-1]
  token = lambda *shape: rng.integers(0, V, shape).astype(np.int32)
  levels = [
    tree.first_level(
      jnp.asarray(token(B, spec.branch)), jnp.asarray(score(B, spec.branch))
    )
  ]
  for level in range(1, spec.levels):
    newest = levels[-1]
    chosen = tree.frontier(spec, level, newest)
    pick = lambda a, i=chosen: jnp.take_along_axis(a, i, axis=1)
    shape = (B, spec.width[level - 1], spec.branch)
    levels.append(
      tree.next_level(
        pick(newest.tokens),
        pick(newest.scores),
        chosen + tree.level_start(spec, level),
        jnp.asarray(token(*shape)),
        jnp.asarray(score(*shape)),
        ends,
      )
    )
  return levels


def twin_build(levels, keep, b):
  """(token, parent node, level, score) of each node, by lists and loops."""
  pool = [
    (float(x.scores[b, i]), int(x.tokens[b, i]), int(x.parent[b, i]), n + 1)
    for n, x in enumerate(levels)
    for i in range(x.tokens.shape[1])
  ]
  best = sorted(range(len(pool)), key=lambda i: (-pool[i][0], i))[:keep]
  kept = sorted(best)
  node = {index + 1: n + 1 for n, index in enumerate(kept)}
  return [
    (pool[i][1], node.get(pool[i][2], 0), pool[i][3], pool[i][0]) for i in kept
  ]


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_dynamic_build_matches_a_sort_and_keeps_parents(steps):
  spec = tree.dynamic(9, 4, 3)
  rng = np.random.default_rng(steps)
  build = jax.jit(lambda root, levels: tree.build(spec, root, levels))
  ends = jnp.asarray([True] + [False] * 9)
  for _ in range(8):
    levels = random_levels(rng, spec, 3, ends, steps)
    root = jnp.asarray([4, 5, 6])
    made, read = jax.device_get((build(root, levels), levels))
    assert made.tokens[:, 0].tolist() == [4, 5, 6]
    for b in range(3):
      twin = twin_build(read, spec.num_nodes - 1, b)
      got = list(
        zip(
          made.tokens[b, 1:].tolist(),
          made.parent[b, 1:].tolist(),
          made.level[b, 1:].tolist(),
          made.scores[b, 1:].tolist(),
          strict=True,
        )
      )
      assert got == twin
      valid = made.valid[b]
      assert valid.tolist() == np.isfinite(made.scores[b]).tolist()
      for i in np.flatnonzero(valid[1:]) + 1:
        parent = made.parent[b, i]
        # the real parent, one level up, before it, valid, no end id
        assert parent < i
        assert valid[parent]
        assert made.level[b, parent] == made.level[b, i] - 1
        assert parent == 0 or made.tokens[b, parent] != 0


def paths_of(spec, children, ends):
  """{token path: score} of the valid nodes, for a drafter whose children of a
  node are `children(path)` = (tokens, scores)."""
  tokens, scores = children(())
  levels = [tree.first_level(jnp.asarray([tokens]), jnp.asarray([scores]))]
  paths = [(t,) for t in tokens]
  for level in range(1, spec.levels):
    newest = levels[-1]
    chosen = tree.frontier(spec, level, newest)
    above = [paths[i] for i in chosen[0]]
    made = [children(p) for p in above]
    levels.append(
      tree.next_level(
        newest.tokens[:, chosen[0]],
        newest.scores[:, chosen[0]],
        chosen + tree.level_start(spec, level),
        jnp.asarray([[t for t, _ in made]]),
        jnp.asarray([[s for _, s in made]]),
        ends,
      )
    )
    paths = [
      (*p, t) for p, (ts, _) in zip(above, made, strict=True) for t in ts
    ]
  made = jax.device_get(tree.build(spec, jnp.asarray([0]), levels))
  found = {}
  for node in np.flatnonzero(made.valid[0, 1:]) + 1:
    path, at = (), node
    while at:
      path, at = (int(made.tokens[0, at]), *path), made.parent[0, at]
    found[path] = float(made.scores[0, node])
  return found


@pytest.mark.parametrize("steps", [2, 1000])
def test_nodes_left_unexpanded_could_not_have_had_a_kept_child(steps):
  ends = jnp.asarray([True] + [False] * 11)
  narrower = 0
  for L, b in [(2, 2), (2, 4), (3, 2), (3, 3), (4, 2)]:
    for M in range(L + 1, L + b + 1):
      spec = tree.dynamic(M, L, b)
      full = dataclasses.replace(spec, width=(b,) * (L - 1))
      narrower += spec.width != full.width
      assert M - 1 <= spec.pool_size <= full.pool_size

      def children(path, seed=M, b=b):
        rng = np.random.default_rng([seed, steps, *path])
        scores = np.sort(-rng.integers(0, steps, b).astype(np.float32))[::-1]
        return rng.permutation(12)[:b].astype(np.int32), scores

      wide = paths_of(full, children, ends)
      assert paths_of(spec, children, ends) == wide
  assert narrower > 5
  assert tree.dynamic(3, 2, 2).width == (1,)


def test_children_of_end_ids_do_not_exist():
  ends = jnp.asarray([False, True, False])
  level = tree.next_level(
    jnp.asarray([[1, 2]]),
    jnp.asarray([[-0.5, -1.0]]),
    jnp.asarray([[3, 4]]),
    jnp.asarray([[[0, 1], [2, 0]]]),
    jnp.asarray([[[-0.25, -0.5], [0.5, -2.0]]]),
    ends,
  )
  # the second parent's first child would outscore it: clamped to the parent
  expected = [-np.inf, -np.inf, -1.0, -3.0]
  assert level.scores[0].tolist() == expected
  assert level.parent[0].tolist() == [3, 3, 4, 4]
  assert level.tokens[0].tolist() == [0, 1, 2, 0]


def test_static_build_keeps_its_table_whatever_the_scores():
  spec = tree.uniform(6, 2)
  ends = jnp.asarray([True] + [False] * 4)
  levels = random_levels(np.random.default_rng(0), spec, 2, ends, 50)
  made = jax.device_get(tree.build(spec, jnp.asarray([1, 2]), levels))
  assert made.parent.tolist() == [[0, 0, 0, 1, 1, 2]] * 2
  assert made.level.tolist() == [[0, 1, 1, 2, 2, 2]] * 2
  for b in range(2):
    under_end = [made.tokens[b, p] == 0 for p in made.parent[b, 3:]]
    assert made.valid[b, 3:].tolist() == [not e for e in under_end]


def test_ancestors_match_climbing_up():
  rng = np.random.default_rng(2)
  M = 12
  parent = np.stack(
    [[0] + [int(rng.integers(0, i)) for i in range(1, M)] for _ in range(4)]
  ).astype(np.int32)
  got = np.asarray(tree.ancestors(jnp.asarray(parent), M))
  for b in range(4):
    for i in range(M):
      above, node = {i, 0}, i
      while node:
        node = parent[b, node]
        above.add(node)
      assert set(np.flatnonzero(got[b, i])) == above


def test_plain_tree_is_the_root():
  made = tree.build(tree.plain(), jnp.asarray([7, 8]), [])
  assert made.tokens.tolist() == [[7], [8]]
  assert made.ancestors.shape == (2, 1, 1)
  assert bool(made.ancestors.all())
  assert bool(made.valid.all())


@pytest.mark.parametrize(
  ("make", "values"),
  [
    (lambda: tree.dynamic(4, 4, 3), ("4 nodes", "4 levels", "at least 5")),
    (lambda: tree.dynamic(23, 3, 3), ("23 nodes", "21 candidates", "most 22")),
    (lambda: tree.dynamic(60, 6, 1), ("60 nodes", "6 candidates", "most 7")),
    (lambda: tree.dynamic(4, 0, 3), ("0 levels", "branch 3")),
    (lambda: tree.uniform(1, 2), ("1", "branch 2")),
  ],
)
def test_impossible_sizes_name_the_values(make, values):
  with pytest.raises(ValueError, match=r"\d") as caught:
    make()
  for value in values:
    assert value in str(caught.value)


def test_budgets_at_the_edge_are_allowed():
  assert tree.dynamic(22, 3, 3).pool_size == 21
  assert tree.dynamic(4, 3, 3).num_nodes == 4


@pytest.mark.parametrize(
  ("kind", "sizes", "said"),
  [
    ("static", {"nodes": 30}, "30"),
    ("chain", {"branch": 3}, "3"),
    ("chain", {"levels": 0}, "0"),
    ("dynamic", {"nodes": 500}, "500"),
    ("uniform", {"levels": 5}, "5"),
    ("bush", {}, "bush"),
  ],
)
def test_tree_by_name_refuses_with_one_line(kind, sizes, said):
  with pytest.raises(InputError, match=said) as caught:
    tree_spec(kind, **sizes)
  assert "\n" not in str(caught.value)
