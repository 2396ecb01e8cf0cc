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

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle_jax.models import masks
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.layers import precision


@struct.dataclass
class Batch:
  """One step's rows, [B, T] each but the features.

  features: [B, T, taps * D], or [B, T, D] for kind "eagle": what is fused.
  final: [B, T, D] after the target's final norm: what is regressed.
  """

  tokens: Array
  mask: Array
  documents: Array
  positions: Array
  features: Array
  final: Array


@struct.dataclass
class Weights:
  """Weights of the loss parts; step i counts decay**i."""

  feature: float
  vocabulary: float
  decay: float


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


def unroll(
  drafter: Drafter,
  params: dict,
  batch: Batch,
  steps: int,
  anchors: Array | None,
) -> list[Array]:
  """The drafter's outputs [B, R, D] of each unrolled step.

  Args:
    anchors: int32[B, R] rows to go on with after step 0; None = all T.
  """
  apply = lambda *a, **k: drafter.apply({"params": params}, *a, **k)
  fed, first = apply(
    shift(batch.tokens, 1),
    apply(batch.features, method="fuse"),
    batch.positions,
    masks.Attend(own=masks.Causal(batch.documents)),
    None,
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
    fed, made = apply(
      at(batch.tokens, anchors, 1 + i),
      fed,
      at(batch.positions, anchors, 0) + i,
      masks.Attend(own=masks.Itself(), earlier=earlier(i)),
      None,
      first,
      tuple(rows),
    )
    rows.append(made)
    outs.append(fed)
  return outs


def losses(
  drafter: Drafter,
  params: dict,
  batch: Batch,
  vocabulary: Array,
  target_head: Array,
  steps: int,
  weights: Weights,
  anchors: Array | None,
) -> tuple[Array, dict[str, Array]]:
  """The weighted loss and what to report.

  The vocabulary loss leaves out rows whose target token is outside the draft
  vocabulary; the feature loss and the metrics do not (outside = a miss). A
  drafter of another width than the target has no feature to regress: weight 0.

  Args:
    vocabulary: int32[W], target ids of the draft vocabulary.
    target_head: [D, W], the target's head cut to those ids.
    anchors: int32[B, R], the rows that are scored; None = all.

  Returns:
    loss, and sums (not means) by step: "rows", "feature", "vocabulary_rows",
    "vocabulary", "hits" (top-1 equals the token that follows), "chain" (this
    and all earlier steps hit): float32[steps] each.
  """
  apply = lambda *a, **k: drafter.apply({"params": params}, *a, **k)
  if drafter.config.hidden_size != batch.final.shape[-1] and weights.feature:
    raise ValueError(
      f"feature weight {weights.feature}: a drafter of width"
      f" {drafter.config.hidden_size} has no feature of the target's width"
      f" {batch.final.shape[-1]} to regress"
    )
  V = drafter.config.vocab_size
  inside = jnp.zeros(V, bool).at[vocabulary].set(True)
  exact = precision(batch.final.dtype)
  scores = jnp.einsum(
    "BTD,DW->BTW",
    batch.final,
    target_head,
    precision=exact,
    preferred_element_type=jnp.float32,
  )
  loss, report = 0.0, []
  chain = True
  for i, out in enumerate(unroll(drafter, params, batch, steps, anchors)):
    rows = at(counted(batch, i), anchors, 0).astype(jnp.float32)
    following = at(batch.tokens, anchors, 2 + i)
    feature = jnp.zeros(())
    if drafter.config.hidden_size == batch.final.shape[-1]:
      wanted = at(batch.final, anchors, 1 + i)
      feature = jnp.sum(rows * smooth_l1(apply(out, method="feature"), wanted))
    logits = apply(out, method="logits")
    cross = soft_cross_entropy(at(scores, anchors, 1 + i), logits)
    known = rows * inside[following]
    vocab = jnp.sum(known * cross)
    hit = vocabulary[jnp.argmax(logits, axis=-1)] == following
    chain = chain & hit
    loss += weights.decay**i * (
      weights.feature * feature / jnp.maximum(rows.sum(), 1.0)
      + weights.vocabulary * vocab / jnp.maximum(known.sum(), 1.0)
    )
    report.append(
      {
        "rows": rows.sum(),
        "feature": feature,
        "vocabulary_rows": known.sum(),
        "vocabulary": vocab,
        "hits": jnp.sum(rows * hit),
        "chain": jnp.sum(rows * chain),
      }
    )
  return loss, jax.tree.map(lambda *x: jnp.stack(x), *report)


def acceptance(report: dict[str, Array]) -> dict[str, list[float] | float]:
  """Held-out figures from summed reports.

  alpha[i]: drafts of step i that hit, given that all earlier steps did (each
    step's chain is a share of its own rows, which end a little earlier).
  tau: tokens a pass of a chain of `steps` drafts, 1 + sum of the chains.
  """
  chains = [
    float(c / n) for c, n in zip(report["chain"], report["rows"], strict=True)
  ]
  before = [1.0, *chains[:-1]]
  alpha = [c / p if p else 0.0 for c, p in zip(chains, before, strict=True)]
  return {"alpha": alpha, "tau": 1.0 + sum(chains)}
