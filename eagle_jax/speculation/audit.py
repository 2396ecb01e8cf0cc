"""Was a divergence from plain decoding a tie that rounding broke?

Both ways compute the same decision rule; in float32 a verify pass of M rows
and a pass of one row differ in the last bits, so two tokens that score alike
may swap. The audit teacher-forces the common prefix and looks at the margin.
In bfloat16 such differences are larger and depend on the model, so the margin
allowed there is measured on the very prefix.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.models import kv_cache, masks
from eagle_jax.speculation import sampling as rule
from eagle_jax.speculation.sampling import SamplingParams
from eagle_jax.speculation.state import Models

FLOAT32_GAP = 1e-4  # of logits; scaled by 1 / temperature below 1
# Other dtypes: times the largest difference that the width of a pass makes.
MEASURED_GAPS = 3.0


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The first place where two answers differ.

  at: index among the new tokens. gap: decision-score difference of the two
  tokens under plain decoding. allowed: the largest excusable gap.
  excused: they are plain decoding's two best and the gap is allowed, or a
  top_k, top_p or min_p edge lies that close.
  """

  at: int
  plain_token: int
  other_token: int
  gap: float
  allowed: float
  excused: bool


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
  for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905
    if x != y:
      return i
  return None if len(a) == len(b) else min(len(a), len(b))


def audit(
  m: Models,
  prompt: Sequence[int],
  plain: Sequence[int],
  other: Sequence[int],
  params: SamplingParams,
  seed: np.ndarray,
) -> Divergence | None:
  """None if the answers are equal, else the verdict.

  Allowed: 1e-4 of logits in float32; else three times the largest difference
  between the logits of a one-row pass and of a many-row pass over the prefix.

  Args:
    prompt, plain, other: token ids; the latter two are answers to the prompt.
    params: the row's sampling parameters, B = 1. seed: uint32[1, 2].
  """
  at = first_difference(plain, other)
  if at is None:
    return None
  temperature = float(params.temperature[0])
  if at >= min(len(plain), len(other)):
    # One answer is a proper beginning of the other: no rounding does that.
    longer = plain if len(plain) > at else other
    return Divergence(at, longer[at], longer[at], np.inf, 0.0, False)
  ids = [*prompt, *plain[:at]]
  # padded to a power of two: a handful of shapes serve all lengths
  T = 1 << max(5, (len(ids) - 1).bit_length())
  tokens = np.zeros((1, T), np.int32)
  tokens[0, : len(ids)] = ids
  seen = np.zeros((1, m.ends.shape[0]), bool)
  seen[0, ids] = True
  logits, wide = _logits(m, tokens, np.int32(len(ids) - 1))
  allowed = FLOAT32_GAP
  if m.target.config.dtype != "float32":
    allowed = MEASURED_GAPS * float(jnp.max(jnp.abs(logits - wide)))
  allowed *= max(1.0, 1 / temperature) if temperature else 1.0
  position = np.asarray([len(ids)], np.int32)

  def scores(p: SamplingParams) -> np.ndarray:
    x = rule.process(logits, seen, p)
    if temperature:
      x += rule.gumbel(seed, position, x.shape[-1])
    return np.asarray(x[0])

  x = scores(params)
  a, b = plain[at], other[at]
  gap = float(abs(x[a] - x[b]))
  two_best = set(np.argsort(-x)[:2].tolist()) == {a, b}
  excused = two_best and gap <= allowed
  if not excused and temperature:
    # Loosen and tighten each cut by the allowed gap: does the choice move?
    shift = 1 + allowed
    variants = []  # of the cuts that are on
    if params.top_p[0] < 1:
      variants.append(params.replace(top_p=params.top_p / shift))
      variants.append(params.replace(top_p=np.minimum(params.top_p * shift, 1)))
    if params.min_p[0] > 0:
      variants.append(params.replace(min_p=params.min_p / shift))
      variants.append(params.replace(min_p=params.min_p * shift))
    k = int(params.top_k[0])
    uncut = params.replace(
      top_k=params.top_k * 0, top_p=params.top_p * 0 + 1, min_p=params.min_p * 0
    )
    best = np.sort(np.asarray(rule.process(logits, seen, uncut)[0]))[::-1]
    # Ranks `last` and `last + 1` may have swapped at the edge: keep one less
    # or one more.
    for last, moved in ((k - 1, k - 1), (k, k + 1)):
      if last >= 1 and best[last - 1] - best[last] <= allowed:
        variants.append(params.replace(top_k=params.top_k * 0 + moved))
    excused = any(
      {int(np.argmax(scores(v))), int(np.argmax(x))} == {a, b} for v in variants
    )
  return Divergence(at, a, b, gap, allowed, bool(excused))


@jax.jit
def _logits(m: Models, tokens, last) -> tuple[jax.Array, jax.Array]:
  """float32[1, V] after token `last`, twice: as plain decoding computes it,
  one row over a cache of the prefix, and from one pass over all rows."""
  run = functools.partial(m.target.apply, {"params": m.target_params})
  T = tokens.shape[1]
  positions = jnp.arange(T)[None]
  out, rows = run(tokens, positions, masks.Attend(own=masks.Causal()), None)
  wide = run(out.feature[:, last], method="logits")
  # All rows make the cache: the first `last` slots are seen.
  cache = kv_cache.of_rows(rows)
  here = jnp.full((1, 1), last)
  attend = masks.Attend(own=masks.Causal(), length=jnp.full(1, last))
  one, _ = run(tokens[:, last][:, None], here, attend, cache)
  return run(one.feature[:, 0], method="logits"), wide
