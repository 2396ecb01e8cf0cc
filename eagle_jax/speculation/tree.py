"""Draft trees: which candidates are drafted, which become nodes.

A cycle drafts a *pool* of candidates level by level and keeps M - 1 of them as
nodes under the root. With branch 2, L = 3:

  candidate    1  2 |  3  4  5  6 |  7  8  9 10
  level        1  1 |  2  2  2  2 |  3  3  3  3
  parent       0  0 |  1  1  2  2 |  4  4  5  5      (0 = the root)

Level 3 hangs under candidates 4 and 5: the frontier, the `branch` best of
level 2 (fewer where the budget M has no use for more). A dynamic tree (EAGLE-2,
arXiv 2406.16858) picks frontiers and nodes by score; a static one by a table.
Both come out as the same `Tree`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

# EAGLE-1's static tree: children by rank, 25 nodes under the root.
EAGLE1_PATHS = (
  *((0,), (1,), (2,), (3,)),
  *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
  *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1)),
  *((0, 2, 0), (0, 2, 1), (1, 0, 0)),
  *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
  *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@dataclasses.dataclass(frozen=True)
class TreeSpec:
  """The static shape of a draft tree.

  num_nodes: M, the root counted. levels: L. branch: children of an expanded
  node. width[j]: how many nodes of level j + 1 are expanded, j < L - 1.
  frontiers, nodes: for static trees, which candidates of a level are expanded
  (index within the level) and which pool candidates are nodes; None = chosen
  by score.
  """

  kind: str
  num_nodes: int
  levels: int
  branch: int
  width: tuple[int, ...]
  frontiers: tuple[tuple[int, ...], ...] | None = None
  nodes: tuple[int, ...] | None = None

  @property
  def pool_size(self) -> int:
    return self.branch * (1 + sum(self.width)) if self.levels else 0


def dynamic(num_nodes: int, levels: int, branch: int) -> TreeSpec:
  """EAGLE-2's tree.

  A level expands its `branch` best nodes, or fewer where the budget is small:
  a child of the r-th best node of level j is kept only with the r best ones of
  that level and the j - 1 nodes above, so r + (j - 1) + 1 <= M - 1. With M = 3,
  L = 2, branch 2, the better node of level 1 is expanded alone.

  Raises:
    ValueError: a budget below the path or above the pool.
  """
  if levels < 1 or branch < 1:
    raise ValueError(
      f"a tree needs at least one level and one branch, not {levels} levels"
      f" of branch {branch}"
    )
  if num_nodes < levels + 1:
    raise ValueError(
      f"{num_nodes} nodes are fewer than one path of {levels} levels and the"
      f" root: give at least {levels + 1} nodes, or fewer levels"
    )
  width = tuple(min(branch, num_nodes - 1 - j) for j in range(1, levels))
  spec = TreeSpec("dynamic", num_nodes, levels, branch, width)
  if num_nodes - 1 > spec.pool_size:
    raise ValueError(
      f"{num_nodes} nodes are more than the {spec.pool_size} candidates that"
      f" {levels} levels of branch {branch} draft, and the root: give at most"
      f" {spec.pool_size + 1} nodes, or more levels or branches"
    )
  return spec


def static(kind: str, paths: tuple[tuple[int, ...], ...]) -> TreeSpec:
  """A tree of fixed shape, from every node's path of child ranks."""
  branch = 1 + max(max(p) for p in paths)
  levels = max(len(p) for p in paths)
  expanded = {p[:-1] for p in paths if len(p) > 1}
  frontiers, nodes, base = [], [], 0
  rows: list[tuple[int, ...]] = [()]  # whose children make up this level
  for level in range(1, levels + 1):
    candidates = [(*row, rank) for row in rows for rank in range(branch)]
    index = {path: i for i, path in enumerate(candidates)}
    nodes += sorted(base + index[p] for p in paths if len(p) == level)
    base += len(candidates)
    if level < levels:
      rows = sorted(p for p in expanded if len(p) == level)
      frontiers.append(tuple(index[p] for p in rows))
  return TreeSpec(
    kind,
    len(paths) + 1,
    levels,
    branch,
    tuple(len(f) for f in frontiers),
    tuple(frontiers),
    tuple(nodes),
  )


def chain(levels: int) -> TreeSpec:
  """One draft a level."""
  return static("chain", tuple((0,) * n for n in range(1, levels + 1)))


def eagle1() -> TreeSpec:
  """The static tree of EAGLE-1, always 26 nodes."""
  return static("static", EAGLE1_PATHS)


def uniform(num_nodes: int, branch: int) -> TreeSpec:
  """`branch` children a node, level by level until the budget is spent."""
  if num_nodes < 2 or branch < 1:
    raise ValueError(
      f"a uniform tree needs 2 or more nodes and a branch, not {num_nodes}"
      f" nodes of branch {branch}"
    )
  paths, level = [], [()]
  while len(paths) < num_nodes - 1:
    level = [(*p, rank) for p in level for rank in range(branch)]
    level = level[: num_nodes - 1 - len(paths)]
    paths += level
  return static("uniform", tuple(paths))


def plain() -> TreeSpec:
  """No drafts: the root alone, which is plain decoding."""
  return TreeSpec("plain", 1, 0, 0, ())


@struct.dataclass
class Tree:
  """M nodes, the root first, parents before children.

    node       0  1  2  3          ancestors  1 . . .
    parent     0  0  0  1                     1 1 . .
    level      0  1  1  2                     1 . 1 .
                                              1 1 . 1

  tokens, parent, level: int32[B, M].
  scores: float32[B, M], the drafter's cumulative log-probability of the path;
    above temperature 0, of the tempered and perturbed scores it ranks by.
  valid: bool[B, M]; an invalid node stands for a candidate that does not
    exist and is never accepted.
  ancestors: bool[B, M, M], itself included.
  """

  tokens: Array
  parent: Array
  level: Array
  scores: Array
  valid: Array
  ancestors: Array


@struct.dataclass
class Level:
  """Candidates of one level: [B, C] each.

  parent: number of the parent candidate, from 1; 0 = the root.
  """

  tokens: Array
  scores: Array
  parent: Array


def first_level(tokens: Array, scores: Array) -> Level:
  """The root's children; scores: log-probabilities, clamped to <= 0."""
  return Level(
    tokens, jnp.minimum(scores, 0.0), jnp.zeros(tokens.shape, jnp.int32)
  )


def next_level(
  frontier_tokens: Array,
  frontier_scores: Array,
  frontier_pool: Array,
  tokens: Array,
  scores: Array,
  ends: Array,
) -> Level:
  """Children of a frontier, parent-major: [B, width * branch].

  Each score is the parent's plus the child's own, clamped to <= 0 so that no
  child outscores its parent. Children of an end id do not exist: -inf.

  Args:
    frontier_tokens, frontier_scores, frontier_pool: [B, width], the expanded
      nodes and their candidate numbers.
    tokens, scores: [B, width, branch], the drafter's best children.
    ends: bool[V], the end ids.
  """
  B, width, branch = tokens.shape
  total = frontier_scores[..., None] + jnp.minimum(scores, 0.0)
  total = jnp.where(ends[frontier_tokens][..., None], -jnp.inf, total)
  parent = jnp.broadcast_to(frontier_pool[..., None], tokens.shape)
  flat = lambda a: a.reshape(B, width * branch)
  return Level(flat(tokens), flat(total), flat(parent))


def frontier(spec: TreeSpec, level: int, newest: Level) -> Array:
  """int32[B, width]: which candidates of the newest level are expanded.

  Args:
    level: of `newest`, from 1.
  """
  B = newest.tokens.shape[0]
  if spec.frontiers is not None:
    rows = jnp.asarray(spec.frontiers[level - 1], jnp.int32)
    return jnp.broadcast_to(rows, (B, len(spec.frontiers[level - 1])))
  return jax.lax.top_k(newest.scores, spec.width[level - 1])[1]


def level_start(spec: TreeSpec, level: int) -> int:
  """Number of a level's first candidate, from 1; level from 1."""
  return 1 + spec.branch * sum((1, *spec.width)[: level - 1])


def build(spec: TreeSpec, root: Array, levels: list[Level]) -> Tree:
  """The pool cut to M - 1 nodes, in pool order, under the root.

  `lax.top_k` lets the lower index win ties, and a parent has a lower index
  and no lower score than its children: it is never dropped before them.

  Args:
    root: int32[B], the last committed token.
    levels: all levels of the pool, L of them.
  """
  B = root.shape[0]
  if not spec.levels:
    column = root[:, None]
    return Tree(
      column,
      jnp.zeros_like(column),
      jnp.zeros_like(column),
      jnp.zeros(column.shape, jnp.float32),
      jnp.ones(column.shape, bool),
      jnp.ones((B, 1, 1), bool),
    )
  join = lambda name: jnp.concatenate([getattr(x, name) for x in levels], 1)
  scores, parents = join("scores"), join("parent")
  number = np.concatenate(
    [np.full(x.tokens.shape[1], i + 1) for i, x in enumerate(levels)]
  ).astype(np.int32)
  if spec.nodes is not None:
    kept = jnp.broadcast_to(
      jnp.asarray(spec.nodes, jnp.int32), (B, len(spec.nodes))
    )
  else:
    kept = jnp.sort(jax.lax.top_k(scores, spec.num_nodes - 1)[1], axis=-1)
  pick = lambda a: jnp.take_along_axis(a, kept, axis=1)
  lead = lambda first, rest: jnp.concatenate([first, rest], axis=1)
  zero = jnp.zeros((B, 1), jnp.int32)
  node_scores = pick(scores)
  # Node number of each kept candidate's parent: its place among the kept,
  # plus one for the root; no match (the root, or an invalid node's) gives 0.
  same = pick(parents)[:, :, None] == 1 + kept[:, None, :]  # [B, M-1, M-1]
  parent = jnp.where(same.any(-1), 1 + jnp.argmax(same, axis=-1), 0)
  parent = lead(zero, parent.astype(jnp.int32))
  return Tree(
    tokens=lead(root[:, None], pick(join("tokens"))),
    parent=parent,
    level=lead(zero, jnp.asarray(number)[kept]),
    scores=lead(jnp.zeros((B, 1)), node_scores),
    valid=lead(jnp.ones((B, 1), bool), jnp.isfinite(node_scores)),
    ancestors=ancestors(parent, spec.levels),
  )


def ancestors(parent: Array, levels: int) -> Array:
  """bool[B, M, M]: row i marks i and all nodes above it.

  Row i is itself joined with its parent's row; after `levels` rounds every
  path has reached the root (whose parent is itself).
  """
  M = parent.shape[1]
  itself = jnp.eye(M, dtype=bool)[None]
  rows = jnp.broadcast_to(itself, (parent.shape[0], M, M))
  for _ in range(levels):
    rows = itself | jnp.take_along_axis(rows, parent[:, :, None], axis=1)
  return rows
