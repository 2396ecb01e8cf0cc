"""Losses of unrolled drafting (arXiv 2401.15077 eq. 4-6; 2503.01840 §3.2).

Step i feeds the drafter its own output of step i-1, as decoding will; row t of
step i reads token t+1+i and is scored against the target's own next token
t+2+i. Who sees whom at step 2, row t = 1 (T = 3):

  step-0 keys   step-1 keys   step-2 keys
   1  1  .       .  1  .       .  1  .

Step 0 runs on all T rows, since all are context. What follows it (later steps,
head, losses) may run on R anchor rows alone: later steps of a row are seen by
that row only, so leaving one out changes no other.

  anchors 1, 3 of T = 4     step-0 keys   step-1 keys   step-2 keys
  row 1                      1  1  .  .       1  .          1  .
  row 3                      1  1  1  1       .  1          .  1
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle_jax.models import masks
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.layers import precision
from eagle_jax.models.target import Target


@struct.dataclass
class Batch:
  """One step's rows, [B, T] each but the features.

  features: [B, T, taps * D], or [B, T, D] for kind "eagle": what is fused.
  final: [B, T, D] after the target's final norm: what is regressed.
  Both are None until the target has run.
  """

  tokens: Array
  mask: Array
  documents: Array
  positions: Array
  features: Array | None
  final: Array | None


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What is summed up, and how it is computed.

  steps: U. decay: step i counts decay**i. feature, vocabulary: weights of the
  two parts. chunk: rows of each sequence whose vocabulary is alive at once, 0
  = all. remat: recompute each step's activations in the backward pass.
  """

  steps: int
  decay: float
  feature: float
  vocabulary: float
  chunk: int
  remat: bool


@struct.dataclass
class Counts:
  """What the sums are divided by: float32[steps] each.

  rows: of the feature loss. known: of the vocabulary loss.
  """

  rows: Array
  known: Array


def shift(x: Array, by: int) -> Array:
  """Column t gets column t + by; zeros past the end."""
  pad = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, pad)[:, by:]


def counted(batch: Batch, step: int) -> Array:
  """bool[B, T]: rows whose step counts.

  t .. t+2+step lie in one document and the mask is 1 on t+1 .. t+2+step:

    document  1 1 1 1 1 2 2 2
    mask      0 0 1 1 1 0 1 1
    step 0    . 1 1 . . 1 . .
    step 1    . 1 . . . . . .
  """
  ok = batch.documents > 0
  for ahead in range(1, 3 + step):
    ok &= shift(batch.documents, ahead) == batch.documents
    ok &= shift(batch.mask, ahead)
  return ok


def document_lengths(batch: Batch) -> Array:
  """float32[B, T]: tokens of the document that each row belongs to."""
  d = batch.documents
  return jnp.sum(d[:, :, None] == d[:, None, :], -1).astype(jnp.float32)


def smooth_l1(a: Array, b: Array) -> Array:
  """Huber loss with beta 1, mean over the last axis, float32."""
  d = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
  return jnp.mean(jnp.where(d < 1, 0.5 * d * d, d - 0.5), axis=-1)


def soft_cross_entropy(scores: Array, logits: Array) -> Array:
  """Cross-entropy of logits [..., W] against softmax(scores), over the last
  axis."""
  wanted = jax.nn.softmax(scores)
  return -jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)


def draw_anchors(batch: Batch, R: int, key: Array) -> Array:
  """int32[B, R]: R rows of each sequence, counted ones first, by chance."""
  chance = jax.random.uniform(key, batch.tokens.shape)
  return jax.lax.top_k(chance + counted(batch, 0), R)[1]


def target_features(
  target: Target,
  params: dict,
  tokens: Array,
  documents: Array,
  positions: Array,
) -> tuple[Array, Array]:
  """(taps or feature [B, T, ·], final feature [B, T, D]) of packed rows, by the
  frozen target."""
  attend = masks.Attend(own=masks.Causal(documents))
  out, _ = target.apply({"params": params}, tokens, positions, attend, None)
  fused = out.taps if target.taps else out.feature
  return jax.lax.stop_gradient((fused, out.feature))


def at(x: Array, anchors: Array | None, ahead: int) -> Array:
  """Rows anchor + ahead of x [B, T, ...] -> [B, R, ...].

  Past the end: zeros where anchors is None (all rows), the last row otherwise;
  `counted` leaves such rows out.
  """
  if anchors is None:
    return shift(x, ahead)
  rows = jnp.minimum(anchors + ahead, x.shape[1] - 1)
  return jnp.take_along_axis(
    x, rows.reshape(rows.shape + (1,) * (x.ndim - 2)), axis=1
  )


def inside(vocabulary: Array, V: int) -> Array:
  """bool[V]: the target ids of the draft vocabulary."""
  return jnp.zeros(V, bool).at[vocabulary].set(True)


def scored(
  batch: Batch, known: Array, step: int, anchors: Array | None
) -> tuple[Array, Array, Array]:
  """(rows, known rows, the tokens that follow) of a step: [B, R] each.

  The vocabulary loss leaves out rows whose target token is outside the draft
  vocabulary; the feature loss and the metrics do not (outside = a miss).

  Args:
    known: bool[V], `inside`.
  """
  rows = at(counted(batch, step), anchors, 0)
  following = at(batch.tokens, anchors, 2 + step)
  return rows, rows & known[following], following


def count(
  batch: Batch, known: Array, steps: int, anchors: Array | None
) -> Counts:
  """Of a whole batch, also where it is then worked off in parts."""
  sums = [
    [jnp.sum(rows, dtype=jnp.float32) for rows in scored(*of)[:2]]
    for of in ((batch, known, i, anchors) for i in range(steps))
  ]
  return Counts(*map(jnp.stack, zip(*sums, strict=True)))


def unroll(
  drafter: Drafter,
  params: dict,
  batch: Batch,
  steps: int,
  anchors: Array | None,
  remat: bool,
) -> list[Array]:
  """The drafter's outputs [B, R, D] of each unrolled step.

  Args:
    anchors: int32[B, R] rows to go on with after step 0; None = all T.
    remat: keep only these outputs and the rows made, recompute the rest.
  """

  def step(params, tokens, fed, positions, attend, earlier, rows):
    return drafter.apply(
      {"params": params}, tokens, fed, positions, attend, None, earlier, rows
    )

  if remat:
    step = jax.checkpoint(step)
  read = lambda ahead, rows: drafter.reads(
    at(batch.tokens, rows, ahead), at(batch.tokens, rows, ahead + 1)
  )
  fed, first = step(
    params,
    read(0, None),
    drafter.apply({"params": params}, batch.features, method="fuse"),
    batch.positions,
    masks.Attend(own=masks.Causal(batch.documents)),
    None,
    (),
  )
  fed = at(fed, anchors, 0)
  outs, rows = [fed], []

  def earlier(i: int) -> masks.Causal | masks.Tree:
    """The step-0 rows that step i sees, i positions further on."""
    causal = masks.Causal(batch.documents, batch.positions)
    if anchors is None:
      return causal
    window = drafter.config.sliding_window
    visible = masks.block_mask(causal, batch.positions + i, window)
    return masks.Tree(jnp.take_along_axis(visible, anchors[..., None], 1))

  for i in range(1, steps):
    fed, made = step(
      params,
      read(i, anchors),
      fed,
      at(batch.positions, anchors, 0) + i,
      masks.Attend(own=masks.Itself(), earlier=earlier(i)),
      first,
      tuple(rows),
    )
    rows.append(made)
    outs.append(fed)
  return outs


def against_target(
  head: Callable[[Array], Array],
  out: Array,
  final: Array,
  target_head: Array,
  chunk: int,
) -> tuple[Array, Array]:
  """Soft cross-entropy and best draft id of each row: [B, R] each.

  With V = 128k one [B, T, V] array of a 2,048-token row takes a gigabyte, and
  a loss needs several. In chunks only [B, chunk, V] is ever alive, in the
  backward pass too, which computes a chunk's scores anew:

    rows    0 1 2 | 3 4 5 | 6 7 .     R = 8, chunk = 3; padding is cut off
    alive          [B, 3, V]

  Args:
    head: drafter outputs [B, C, D] -> logits [B, C, W].
    out: [B, R, D], the drafter's outputs.
    final: [B, R, D], the target's features at the same places.
    target_head: [D, W].
  """

  def rows(out, final):
    logits = head(out)
    scores = jnp.einsum(
      "BCD,DW->BCW",
      final,
      target_head,
      precision=precision(final.dtype),
      preferred_element_type=jnp.float32,
    )
    return soft_cross_entropy(scores, logits), jnp.argmax(logits, axis=-1)

  B, R, D = out.shape
  if not chunk or chunk >= R:
    return rows(out, final)
  n = -(-R // chunk)

  def cut(x):
    x = jnp.pad(x, ((0, 0), (0, n * chunk - R), (0, 0)))
    return x.reshape(B, n, chunk, D).swapaxes(0, 1)  # B stays as it is shared

  again = jax.checkpoint(rows)
  _, made = jax.lax.scan(
    lambda _, x: (None, again(*x)), None, (cut(out), cut(final))
  )
  join = lambda x: x.swapaxes(0, 1).reshape(B, n * chunk)[:, :R]
  return jax.tree.map(join, made)


def losses(
  drafter: Drafter,
  params: dict,
  batch: Batch,
  vocabulary: Array,
  target_head: Array,
  recipe: Recipe,
  anchors: Array | None,
  counts: Counts,
) -> tuple[Array, dict[str, Array]]:
  """The weighted loss and what to report.

  A drafter of another width than the target has no feature to regress: its
  recipe must say weight 0.

  Args:
    vocabulary: int32[W], target ids of the draft vocabulary.
    target_head: [D, W], the target's head cut to those ids.
    anchors: int32[B, R], the rows that are scored; None = all.
    counts: of the whole batch that this one is a part of (`count`).

  Returns:
    loss, and sums (not means) by step: "rows", "feature", "vocabulary_rows",
    "vocabulary", "hits" (top-1 equals the token that follows), "chain" (this
    and all earlier steps hit): float32[steps] each.
  """
  apply = lambda *a, **k: drafter.apply({"params": params}, *a, **k)
  regresses = drafter.config.hidden_size == batch.final.shape[-1]
  if recipe.feature and not regresses:
    raise ValueError(
      f"feature weight {recipe.feature}: a drafter of width"
      f" {drafter.config.hidden_size} has no feature of the target's width"
      f" {batch.final.shape[-1]} to regress"
    )
  head = lambda out: apply(out, method="logits")
  known_ids = inside(vocabulary, drafter.config.vocab_size)
  loss, report = 0.0, []
  chain = True
  outs = unroll(drafter, params, batch, recipe.steps, anchors, recipe.remat)
  for i, out in enumerate(outs):
    rows, known, following = scored(batch, known_ids, i, anchors)
    final = at(batch.final, anchors, 1 + i)
    feature = jnp.zeros(())
    if regresses:
      distance = smooth_l1(apply(out, method="feature"), final)
      feature = jnp.sum(rows * distance)
    cross, best = against_target(head, out, final, target_head, recipe.chunk)
    vocab = jnp.sum(known * cross)
    hit = vocabulary[best] == following
    chain = chain & hit
    loss += recipe.decay**i * (
      recipe.feature * feature / jnp.maximum(counts.rows[i], 1.0)
      + recipe.vocabulary * vocab / jnp.maximum(counts.known[i], 1.0)
    )
    report.append(
      {
        "rows": jnp.sum(rows, dtype=jnp.float32),
        "feature": feature,
        "vocabulary_rows": jnp.sum(known, dtype=jnp.float32),
        "vocabulary": vocab,
        "hits": jnp.sum(rows & hit, dtype=jnp.float32),
        "chain": jnp.sum(rows & chain, dtype=jnp.float32),
      }
    )
  return loss, jax.tree.map(lambda *x: jnp.stack(x), *report)


def figures(report: dict[str, Array]) -> dict[str, list[float] | float]:
  """What summed reports say.

  alpha[i]: drafts of step i that hit, given that all earlier steps did (each
    step's chain is a share of its own rows, which end a little earlier).
  tau: tokens a pass of a chain of `steps` drafts, 1 + sum of the chains.
  hits[i]: drafts of step i that hit, whatever the earlier ones did.
  feature_loss, vocabulary_loss: means by step.
  A step without rows counts as one that never hits.
  """
  share = lambda a, b: [
    float(x / max(n, 1)) for x, n in zip(report[a], report[b], strict=True)
  ]
  chains = share("chain", "rows")
  before = [1.0, *chains[:-1]]
  return {
    "alpha": [c / p if p else 0.0 for c, p in zip(chains, before, strict=True)],
    "tau": 1.0 + sum(chains),
    "hits": share("hits", "rows"),
    "feature_loss": share("feature", "rows"),
    "vocabulary_loss": share("vocabulary", "vocabulary_rows"),
  }
