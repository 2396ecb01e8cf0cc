"""What the parts of a decode cycle cost on the device at hand."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import loading
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.loading import LoadedTarget
from eagle_jax.models import masks
from eagle_jax.speculation import decoding, engine, sampling, tree
from eagle_jax.speculation import state as states
from eagle_jax.speculation.state import DecodeState, Models
from eagle_jax.speculation.tree import TreeSpec

SLOTS = 512  # of the caches, half of them committed
GROUPS, CALLS = 5, 4  # timed one after another, and dispatched together
DRAFTED = (2, 4)  # levels of the two grown trees whose difference is a level
EXTENDED = (2, 8)  # rows


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of each part, for one batch; all by size, to interpolate.

  verify: M -> one target pass; on an accelerator with the head, and the walk
    costs nothing beside it. What follows is of a CPU.
  head: M -> the head's one product over all nodes, for those M that have it
    (`loading.lazy_head`). step: one step of the walk otherwise, which reads
    the head for one row and decides; decide: the decision alone.
  first: branch -> drafting's fixed part. level: nodes expanded -> each level
    after the first. extend: rows -> the drafter re-reading accepted tokens.
  """

  verify: dict[int, float]
  head: dict[int, float]
  step: float
  decide: float
  first: dict[int, float]
  level: dict[int, float]
  extend: dict[int, float]

  def drafting(self, spec: TreeSpec) -> float:
    return (
      _at(self.first, spec.branch)
      + sum(_at(self.level, width) for width in spec.width)
      + _at(self.extend, spec.levels + 1)
    )

  def verifying(self, nodes: int, tau: float) -> float:
    one_product = self.head and nodes <= max(self.head)
    head = (
      _at(self.head, nodes) + tau * self.decide
      if one_product
      else tau * self.step
    )
    return _at(self.verify, nodes) + head

  def cycle(self, spec: TreeSpec, tau: float) -> float:
    return self.drafting(spec) + self.verifying(spec.num_nodes, tau)

  def plain(self) -> float:
    """Seconds a token of plain decoding."""
    return self.verifying(1, 1.0)


def _at(table: dict[int, float], size: int) -> float:
  """Linear between measured sizes, and beyond them."""
  sizes = sorted(table)
  if len(sizes) == 1:
    return table[sizes[0]]
  i = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
  a, b = sizes[i - 1], sizes[i]
  slope = (table[b] - table[a]) / (b - a)
  return max(table[a] + slope * (size - a), 0.0)


def timed(run: Callable[[], object]) -> float:
  """Seconds of one call. The fastest group counts, since whatever else the
  machine does only adds to it; calls of a group are dispatched together, as
  the parts of a cycle are."""
  jax.block_until_ready(run())
  found = []
  for _ in range(GROUPS):
    began = time.perf_counter()
    jax.block_until_ready([run() for _ in range(CALLS)])
    found.append((time.perf_counter() - began) / CALLS)
  return min(found)


def _verify(m: Models, state: DecodeState, drafted: tree.Tree):
  """The target's share of `decoding.cycle`, on a CPU without the head."""
  out, rows = m.target.apply(
    {"params": m.target_params},
    drafted.tokens,
    state.length[:, None] + drafted.level,
    masks.Attend(own=masks.Tree(drafted.ancestors), length=state.length),
    state.cache,
  )
  return (out, rows) if _apart(m) else (_head(m, out.feature), out, rows)


def _apart(m: Models) -> bool:
  """Is the head a matter of its own: on a CPU?"""
  return m.lazy_head or m.target.on_cpu


def _head(m: Models, feature):
  return m.target.apply({"params": m.target_params}, feature, method="logits")


def _decide(m: Models, state: DecodeState, logits):
  return sampling.next_token(
    logits, state.seen, state.sampling, state.seeds, state.length + 1
  )


def _step(m: Models, state: DecodeState, feature):
  return _decide(m, state, _head(m, feature))


class Clock:
  """Times parts of the cycle with one pair of models.

  Args:
    batch_size: rows decoded together.
    temperature: 0 = greedy; above it decisions draw noise, and drafts are
      ranked by it where draft_noise is above 0.
  """

  def __init__(
    self,
    target: LoadedTarget,
    drafter: LoadedDrafter,
    batch_size: int,
    temperature: float,
    draft_noise: float,
  ):
    self.target, self.drafter, self.B = target, drafter, batch_size
    self.setting = sampling.one_setting(batch_size, temperature, draft_noise)
    self.slots = min(SLOTS, target.config.max_positions)
    plain = loading.models(target, drafter, tree.chain(1))
    # the caches do not depend on the tree
    self.state = self._state(plain)

  def _state(self, m: Models) -> DecodeState:
    full = jnp.full(self.B, self.slots // 2, jnp.int32)
    return states.init_state(m, self.B, self.slots, self.slots).replace(
      length=full,
      limit=full * 2,
      finished=jnp.zeros(self.B, bool),
      sampling=self.setting,
    )

  def _time(self, part, m: Models, *args) -> float:
    run = jax.jit(
      part, compiler_options=engine.compiler_options(jax.default_backend())
    )
    return timed(functools.partial(run, m, *args))

  def _models(self, nodes: int) -> Models:
    spec = tree.chain(nodes - 1) if nodes > 1 else tree.plain()
    return loading.models(self.target, self.drafter, spec)

  def verify(self, nodes: int) -> float:
    m = self._models(nodes)
    parent = jnp.maximum(jnp.arange(nodes) - 1, 0)[None]
    wide = lambda a: jnp.broadcast_to(a, (self.B, nodes)).astype(jnp.int32)
    drafted = tree.Tree(
      tokens=wide(0),
      parent=wide(parent),
      level=wide(jnp.arange(nodes)),
      scores=wide(0).astype(jnp.float32),
      valid=wide(1).astype(bool),
      ancestors=tree.ancestors(wide(parent), nodes),
    )
    return self._time(_verify, m, self.state, drafted)

  def head(self, nodes: int) -> float | None:
    """None where the walk reads it node by node, or verify has it."""
    m = self._models(nodes)
    if m.lazy_head or not m.target.on_cpu:
      return None
    c = self.target.config
    return self._time(
      _head, m, jnp.ones((self.B, nodes, c.hidden_size), c.dtype)
    )

  def step(self) -> tuple[float, float]:
    """(with the head of one row, the decision alone)."""
    m = self._models(1)
    if not _apart(m):
      return 0.0, 0.0
    c = self.target.config
    feature = jnp.ones((self.B, c.hidden_size), c.dtype)
    logits = jnp.zeros((self.B, c.vocab_size), jnp.float32)
    return (
      self._time(_step, m, self.state, feature),
      self._time(_decide, m, self.state, logits),
    )

  def draft(self, branch: int) -> tuple[float, float]:
    """(fixed part, each level after the first)."""
    times = []
    for levels in DRAFTED:
      pool = branch * (1 + (levels - 1) * branch)
      # so many nodes that each level expands `branch` of its own
      nodes = min(pool + 1, branch + levels)
      spec = tree.dynamic(nodes, levels, branch)
      m = loading.models(self.target, self.drafter, spec)
      times.append(self._time(decoding.grow, m, self._state(m)))
    a, b = DRAFTED
    level = max(times[1] - times[0], 0.0) / (b - a)
    return max(times[0] - (a - 1) * level, 0.0), level

  def extend(self, rows: int) -> float:
    m = loading.models(self.target, self.drafter, tree.chain(1))
    taps = max(len(self.drafter.config.taps), 1)
    width = taps * self.target.config.hidden_size
    full = jnp.full(self.B, rows - 1, jnp.int32)
    return self._time(
      decoding.extend,
      m,
      self.state,
      jnp.ones((self.B, rows, width), self.target.config.dtype),
      jnp.zeros((self.B, rows), jnp.int32),
      full,
      self.state.length + rows,
    )


def measure(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  batch_size: int,
  nodes: Sequence[int],
  branches: Sequence[int],
  most: float,
  temperature: float,
  draft_noise: float,
) -> Costs:
  """Time the parts; larger M are left out once they cannot pay.

  Args:
    nodes: M, ascending, 1 first. branches: at least one.
    most: tokens a pass of the best tree there is; a pass that costs more
      than so many plain ones is slower than plain decoding.
    temperature, draft_noise: as in `Clock`.
  """
  clock = Clock(target, drafter, batch_size, temperature, draft_noise)
  verify: dict[int, float] = {}
  for M in nodes:
    verify[M] = clock.verify(M)
    if verify[M] > most * verify[1]:
      break
  heads = {M: clock.head(M) for M in verify}
  drafts = {b: clock.draft(b) for b in branches}
  return Costs(
    verify,
    {M: s for M, s in heads.items() if s is not None},
    *clock.step(),
    {b: d[0] for b, d in drafts.items()},
    {b: d[1] for b, d in drafts.items()},
    {rows: clock.extend(rows) for rows in EXTENDED},
  )
