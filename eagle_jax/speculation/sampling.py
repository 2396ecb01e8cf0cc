"""The next token, as one function of (logits, seen ids, seed, position).

Noise is keyed by (row seed, absolute position), never by step, so the token
at a position is the same whether plain decoding or a draft tree asks for it:

  token(t) = argmax(processed(logits(t - 1)) / temperature + Gumbel(seed, t))

which is an exact draw from the softmax (Gumbel-max; drafter-invariant
coupling, arXiv 2408.07978).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

_WIDE = 16384  # columns from which two short sorts beat one long one
_GROUP = 128  # columns a group: the lanes of a TPU's vector


@struct.dataclass
class SamplingParams:
  """One value a row, all traced: changing them compiles nothing.

  temperature: float32[B], 0 = greedy. top_k: int32[B], 0 = off.
  top_p: float32[B], 1 = off. min_p: float32[B], 0 = off.
  repetition_penalty: float32[B], 1 = off.
  draft_noise: float32[B], strength of the shared noise in drafting.
  """

  temperature: Array
  top_k: Array
  top_p: Array
  min_p: Array
  repetition_penalty: Array
  draft_noise: Array


def one_setting(
  rows: int, temperature: float, draft_noise: float
) -> SamplingParams:
  """The same for `rows` rows, nothing cut and nothing punished."""
  full = lambda x, dtype: jnp.full(rows, x, dtype)
  return SamplingParams(
    temperature=full(temperature, jnp.float32),
    top_k=full(0, jnp.int32),
    top_p=full(1, jnp.float32),
    min_p=full(0, jnp.float32),
    repetition_penalty=full(1, jnp.float32),
    draft_noise=full(draft_noise, jnp.float32),
  )


def row_seed(seed: int, request: int, sample: int) -> Array:
  """uint32[2]: the seed of one row, by stable request and sample numbers."""
  key = jax.random.fold_in(jax.random.key(seed), request)
  return jax.random.key_data(jax.random.fold_in(key, sample))


def gumbel(seeds: Array, positions: Array, V: int) -> Array:
  """float32[B, V]: the noise of the tokens at `positions`.

  Args:
    seeds: uint32[B, 2]. positions: int32[B], of the drawn token.
    V: the target's vocabulary; independent of batch, tree and dtype.
  """

  def one(seed, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
    return jax.random.gumbel(key, (V,), jnp.float32)

  return jax.vmap(one)(seeds, positions)


def _sortable(x: Array) -> Array:
  """uint32 of the same order as the float32 x (-0 becomes 0)."""
  bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits & sign, ~bits, bits | sign)


def _largest_threshold(keys: Array, enough) -> Array:
  """uint32[B, 1]: the largest threshold whose kept set is still `enough`.

  Radix search, bit by bit: 32 passes over V, exact, and on CPU far faster
  than sorting the vocabulary. Ties at the threshold are kept.

  Args:
    keys: uint32[B, V].
    enough: bool[B, V] (kept) -> bool[B, 1]; holds for everything kept.
  """

  def bit(i, found):
    tried = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
    return jnp.where(enough(keys >= tried), tried, found)

  none = jnp.zeros((keys.shape[0], 1), jnp.uint32)
  return jax.lax.fori_loop(0, 32, bit, none)


def process(logits: Array, seen: Array, params: SamplingParams) -> Array:
  """Decision scores before noise: float32[B, V], -inf where cut.

  Order: repetition penalty (each seen id once, the prompt's included),
  temperature, top_k, top_p, min_p.

  Args:
    logits: float32[B, V]. seen: bool[B, V].
  """
  column = lambda a: a[:, None]
  penalty = column(params.repetition_penalty)
  punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
  x = jnp.where(seen, punished, logits)
  greedy = column(params.temperature <= 0)
  x = x / jnp.where(greedy, 1.0, column(params.temperature))

  def cut_top_k(x):
    k = column(params.top_k)
    keys = _sortable(x)
    floor = _largest_threshold(
      keys, lambda kept: jnp.sum(kept, -1, keepdims=True) >= k
    )
    return jnp.where((k > 0) & (keys < floor), -jnp.inf, x)

  def cut_top_p(x):
    p = column(params.top_p)
    probs = jax.nn.softmax(x, axis=-1)
    keys = _sortable(probs)
    # the rounded sum of all may fall short of p close to 1
    whole = jnp.sum(probs, -1, keepdims=True)
    goal = jnp.minimum(p, whole)
    floor = _largest_threshold(
      keys,
      lambda kept: (
        jnp.sum(jnp.where(kept, probs, 0), -1, keepdims=True) >= goal
      ),
    )
    return jnp.where((p < 1) & (keys < floor), -jnp.inf, x)

  def cut_min_p(x):
    best = jnp.max(x, axis=-1, keepdims=True)
    floor = best + jnp.log(column(params.min_p))
    return jnp.where(x < floor, -jnp.inf, x)

  # A processor that no row uses costs nothing.
  same = lambda x: x
  sampled = params.temperature > 0
  x = jax.lax.cond(jnp.any((params.top_k > 0) & sampled), cut_top_k, same, x)
  x = jax.lax.cond(jnp.any((params.top_p < 1) & sampled), cut_top_p, same, x)
  return jax.lax.cond(jnp.any((params.min_p > 0) & sampled), cut_min_p, same, x)


def next_token(
  logits: Array,
  seen: Array,
  params: SamplingParams,
  seeds: Array,
  positions: Array,
) -> Array:
  """int32[B]: the target's token at `positions`. The one decision rule.

  Args:
    logits: float32[B, V] at the position before.
    seen: bool[B, V], ids of the prompt and of all tokens before.
    seeds: uint32[B, 2]. positions: int32[B], of the token to come.
  """
  V = logits.shape[-1]

  def drawn(_):
    x = process(logits, seen, params)
    noise = gumbel(seeds, positions, V)
    noise = jnp.where(params.temperature[:, None] > 0, noise, 0.0)
    return jnp.argmax(x + noise, axis=-1).astype(jnp.int32)

  def best(_):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  needed = (params.temperature > 0) | (params.repetition_penalty != 1)
  return jax.lax.cond(jnp.any(needed), drawn, best, None)


def top_k(
  x: Array, k: int, whole: Callable[[Array], Array] = lambda a: a
) -> tuple[Array, Array]:
  """`jax.lax.top_k` over the last axis, ties included, for wide rows.

  A TPU sorts the whole row for `lax.top_k`. The k largest values lie in the k
  groups whose maxima are the largest (each group before theirs brings one
  value that is no smaller and comes no later), so two short sorts do:

    k = 2, groups of 2     3 1 | 7 2 | 5 6 | 0 4
    maxima                  3     7     6     4
    best groups, in order        7 2 | 5 6
    best values                  7       6

  No group crosses a sixteenth of the row (or an eighth, ...), so that a
  vocabulary that is cut over chips is grouped where it lies.

  Args:
    x: float32[..., W], finite.
    whole: lays an array whole on every chip. Where W is cut, two small arrays
      travel, the maxima and the best groups, and each chip does the rest.
  """
  W = x.shape[-1]
  if max(_WIDE, _GROUP * k) >= W:
    return jax.lax.top_k(whole(x), k)
  parts = math.gcd(W, 16)
  part = W // parts
  groups = -(-part // _GROUP)
  x = x.reshape(*x.shape[:-1], parts, part)
  pad = [(0, 0)] * (x.ndim - 1) + [(0, groups * _GROUP - part)]
  x = jnp.pad(x, pad, constant_values=-jnp.inf)
  x = x.reshape(*x.shape[:-2], parts * groups, _GROUP)
  maxima = whole(jnp.max(x, axis=-1))
  chosen = jnp.sort(jax.lax.top_k(maxima, k)[1], axis=-1)
  near = whole(jnp.take_along_axis(x, chosen[..., None], axis=-2))
  best, at = jax.lax.top_k(near.reshape(*near.shape[:-2], k * _GROUP), k)
  group = jnp.take_along_axis(chosen, at // _GROUP, axis=-1)
  column = group % groups * _GROUP + at % _GROUP
  return best, group // groups * part + column


def draft_children(
  logits: Array,
  branch: int,
  vocabulary: Array,
  params: SamplingParams,
  noise: Array,
  whole: Callable[[Array], Array] = lambda a: a,
) -> tuple[Array, Array]:
  """The best children of each row, and what they are worth.

  At temperature 0 the drafter's most probable tokens. Above it, children are
  the best of log q / temperature + draft_noise * Gumbel(seed, position): the
  target will decide with that very noise, so drafter and target draw with the
  same dice. The target's token does not depend on the draft, hence neither
  does the output.

  Args:
    logits: float32[B, T, W] of the drafter.
    vocabulary: int32[W], draft id -> target id.
    noise: float32[B, W] at the children's position, of the draft ids.
    whole: as in `top_k`.

  Returns:
    tokens int32[B, T, branch] (target ids) and log-probabilities
    float32[B, T, branch], best first.
  """
  wide = lambda a: a[:, None, None]
  warm = wide(params.temperature > 0)
  keys = logits / jnp.where(warm, wide(params.temperature), 1.0)
  keys += jnp.where(warm, wide(params.draft_noise), 0.0) * noise[:, None]
  total = whole(jax.nn.logsumexp(keys, axis=-1, keepdims=True))
  best, index = top_k(keys, branch, whole)
  return vocabulary[index], best - total
