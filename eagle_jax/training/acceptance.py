"""What a drafter's trees are worth, estimated from known answers.

One unrolled pass over answers that the target gave shows, for every context
and level of the true path, the drafter's best children and which of them the
target's token was. From that the tokens a pass of any dynamic tree follow,
without growing one: `--tree auto` chooses by them.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.loading import LoadedTarget
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.speculation import engine, sampling
from eagle_jax.speculation.tree import EAGLE1_PATHS
from eagle_jax.training import losses

LEVELS, BRANCHES = (1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 6, 8, 10)
NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 26, 32, 40, 48, 60)


@dataclasses.dataclass(frozen=True)
class Drawn:
  """How known answers were drawn: drafts of them may use the same noise.

  temperature: above 0. strength: of the shared noise in drafting.
  seeds: uint32[rows, 2], as `sampling.row_seed` gives them.
  """

  temperature: float
  strength: float
  seeds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Observed:
  """Contexts of known answers; level j is drafted below j true tokens.

  scores: float32[n, levels, width], of the best children, as
    `sampling.draft_children` ranks them: log-probabilities for greedy drafts.
  rank: int32[n, levels], which child the target's token was; width = none.
  run: int32[n], ascending: contexts of one run follow each other in an answer.
  """

  scores: np.ndarray
  rank: np.ndarray
  run: np.ndarray

  def by_rank(self) -> np.ndarray:
    """[levels, width]: how often each child is the token, given that all
    levels above were drafted (among all children, not the first alone)."""
    width = self.scores.shape[-1]
    inside = np.cumprod(self.rank < width, axis=1)
    above = np.concatenate([np.ones((len(inside), 1)), inside[:, :-1]], axis=1)
    hit = self.rank[..., None] == np.arange(width)
    total = np.maximum(above.sum(0), 1)[:, None]
    return (hit * above[..., None]).sum(0) / total


def observe(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  tokens: np.ndarray,
  mask: np.ndarray,
  documents: np.ndarray,
  positions: np.ndarray,
  drawn: Drawn | None = None,
) -> Observed:
  """Every context of packed answers that has all levels behind it.

  Args:
    tokens, mask, documents, positions: [rows, T], as `data.Packed` draws them.
    drawn: None = greedy drafts.
  """
  module = Drafter(drafter.config)
  network = Target(target.config, drafter.config.taps)
  levels = max(LEVELS)
  width = min(max(BRANCHES), drafter.config.draft_vocab_size)
  T, V = tokens.shape[1], target.config.vocab_size
  setting = sampling.one_setting(
    T, drawn.temperature if drawn else 0.0, drawn.strength if drawn else 0.0
  )

  @functools.partial(
    jax.jit, compiler_options=engine.compiler_options(jax.default_backend())
  )
  def look(
    target_params, params, vocabulary, seed, tokens, mask, documents, where
  ):
    fused, final = losses.target_features(
      network, target_params, tokens, documents, where
    )
    batch = losses.Batch(tokens, mask, documents, where, fused, final)
    # of the token that level 0 drafts in each row; level i's is i rows on
    noise = jnp.zeros((T, len(vocabulary)), jnp.float32)
    if drawn:
      every = jnp.broadcast_to(seed, (T, 2))
      noise = sampling.gumbel(every, where[0] + 2, V)[:, vocabulary]
    scores, ranks = [], []
    for i, out in enumerate(
      losses.unroll(module, params, batch, levels, None, False)
    ):
      logits = module.apply({"params": params}, out, method="logits")
      children, best = sampling.draft_children(
        logits[0, :, None],
        width,
        vocabulary,
        setting,
        losses.shift(noise[None], i)[0],
      )
      same = children[None, :, 0] == losses.shift(tokens, 2 + i)[..., None]
      scores.append(best[None, :, 0])
      ranks.append(jnp.where(same.any(-1), jnp.argmax(same, -1), width))
    rows = losses.counted(batch, levels - 1)
    return jnp.stack(scores, 2), jnp.stack(ranks, 2), rows

  found, runs = [], 0
  for r in range(len(tokens)):
    row = slice(r, r + 1)
    scores, ranks, rows = jax.device_get(
      look(
        target.params,
        drafter.params,
        drafter.vocabulary,
        drawn.seeds[r] if drawn else np.zeros(2, np.uint32),
        tokens[row],
        mask[row],
        documents[row],
        positions[row],
      )
    )
    breaks = np.diff(np.flatnonzero(rows[0]), prepend=-1) > 1
    run = np.cumsum(breaks, dtype=np.int32)
    found.append((scores[rows], ranks[rows], runs + run))
    runs += 1 + run.max(initial=0)
  return Observed(*(np.concatenate(a) for a in zip(*found, strict=True)))


def chain_name(levels: int) -> str:
  return f"chain::{levels}"


def dynamic_name(nodes: int, levels: int, branch: int) -> str:
  return f"dynamic:{nodes}:{levels}:{branch}"


def place_on_path(
  seen: Observed, levels: int, branch: int, seed: int = 0
) -> np.ndarray:
  """int[n, levels]: rank in its pool of the true path's node of each level.

  The pool is drafted as `tree` does it: `branch` children of the `branch`
  best nodes of each newest level, scores summed (where a small budget makes
  `tree` expand fewer, the kept nodes are the same). Children of nodes off the
  true path were not observed: those of another context stand in for them
  (with another position's noise, where drafts were `Drawn`).
  A node beyond the pool (or not drafted) has the place 10**9.

    pool, best first   a  x  b  y  z     a, b on the true path
    place              0  1  2  3  4  -> [0, 2]; M = 3 keeps a alone (a, x)
  """
  n = len(seen.rank)
  rng = np.random.default_rng(seed)
  ranks = np.arange(branch)
  own = np.minimum(seen.scores[:, :, :branch], 0.0)
  scores = own[:, 0]
  on = ranks == seen.rank[:, :1]
  pool_scores, pool_on = [scores], [on]
  for level in range(1, levels):
    best = np.argsort(-scores, axis=1, kind="stable")[:, :branch]
    above = np.take_along_axis(scores, best, 1)[..., None]
    true = np.take_along_axis(on, best, 1)[..., None]
    others = own[rng.integers(0, n, best.shape), level]
    children = np.where(true, own[:, None, level], others)
    scores = (above + children).reshape(n, -1)
    hit = (ranks == seen.rank[:, level, None])[:, None]
    on = (true & hit).reshape(n, -1)
    pool_scores.append(scores)
    pool_on.append(on)
  order = np.argsort(-np.concatenate(pool_scores, 1), axis=1, kind="stable")
  place = np.argsort(order, axis=1)
  out, start = np.full((n, levels), 10**9), 0
  for level, on in enumerate(pool_on):
    here = place[:, start : start + on.shape[1]]
    out[:, level] = np.where(on, here, 10**9).min(1)
    start += on.shape[1]
  return out


def along(accepted: np.ndarray, run: np.ndarray) -> float:
  """Tokens a pass, where each cycle starts where the one before ended.

  The mean over all contexts would be more than that: the easy ones stand
  beside each other, and a long accept skips them.

    accept length   2 2 2 0 | 0 0     two runs, 6 tokens
    cycle starts    ^     ^ | ^ ^     4 cycles: 6 / 4, not 1 + 6 / 6

  Args:
    accepted: int[n], what a cycle that starts at each context would accept.
    run: as in `Observed`.
  """
  tokens = cycles = at = 0
  for end in np.append(np.flatnonzero(np.diff(run)) + 1, len(run)):
    while at < end:
      tokens += 1 + accepted[at]
      cycles += 1
      at += 1 + accepted[at]
    at = end
  return float(tokens / cycles)


def tokens_a_pass(seen: Observed) -> dict[str, float]:
  """Expected tau of every tree of the grid, by the tree's name."""
  width = seen.scores.shape[-1]
  tau = lambda accepted: along(accepted, seen.run)
  first = np.cumprod(seen.rank == 0, axis=1)
  taus = {chain_name(L): tau(first[:, :L].sum(1)) for L in LEVELS}
  inside = [{p for p in EAGLE1_PATHS if len(p) == d} for d in range(1, 6)]
  if width >= 4:
    depth = [
      sum(tuple(r[: d + 1]) in paths for d, paths in enumerate(inside))
      for r in seen.rank.tolist()
    ]
    taus["static"] = tau(np.asarray(depth))
  for branch in BRANCHES[1:]:
    if branch > width:
      continue
    for L in LEVELS:
      place = place_on_path(seen, L, branch)
      pool = branch * (1 + (L - 1) * branch)
      for M in NODES:
        if L + 1 <= M <= pool + 1:
          kept = (place < M - 1).sum(1)
          taus[dynamic_name(M, L, branch)] = tau(kept)
  return taus


def of_answers(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  prompts: Sequence[Sequence[int]],
  answers: Sequence[Sequence[int]],
  drawn: Drawn | None = None,
) -> Observed:
  """`observe` of prompts and the target's own answers to them, a row each."""
  longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
  T = -(-longest // 64) * 64  # few shapes serve all lengths
  tokens = np.zeros((len(prompts), T), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
    tokens[row, : len(p) + len(a)] = [*p, *a]
    mask[row, len(p) : len(p) + len(a)] = True
  positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
  inside = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] > 0  # up to the last token
  return observe(
    target, drafter, tokens, mask, inside.astype(np.int32), positions, drawn
  )
