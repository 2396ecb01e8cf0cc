"""Keys and values: rows made by one call, and the cache they are put into.

A forward call only reads the cache and returns the rows it made; `commit`
writes the rows worth keeping. Nothing uncommitted ever lies in a cache, so a
dropped draft needs no clean-up:

  cache  [ k0 k1 k2 .. .. .. ]      length 3, capacity S = 6
  rows   ( r0 r1 r2 r3 )            M = 4 tree rows of one verify pass
  path   ( 0  2 )                   accepted: the root and node 2
  commit [ k0 k1 k2 r0 r2 .. ]      length 5
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class KV:
  """Rows of one layer: keys (after rotary embedding), values, [B, K, X, H]."""

  k: Array
  v: Array


@struct.dataclass
class Slots:
  """The cache of one layer: keys [B, K, H, S], values [B, K, S, H].

  Both products of attention then run along rows of memory: the scores of few
  queries q @ k along the slots, the values' mix w @ v along H. (XLA on CPU
  takes 2 to 3 times as long for scores against keys [S, H], 1 to 5 queries.)
  """

  k: Array
  v: Array


Rows = tuple[KV, ...]  # one a layer
Cache = tuple[Slots, ...]  # one a layer


def init(
  batch: int,
  num_layers: int,
  num_kv_heads: int,
  capacity: int,
  head_size: int,
  dtype,
) -> Cache:
  """A cache of zeros; unwritten slots are masked by the row's length."""
  keys = (batch, num_kv_heads, head_size, capacity)
  values = (batch, num_kv_heads, capacity, head_size)
  return tuple(
    Slots(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))
    for _ in range(num_layers)
  )


def of_rows(rows: Rows) -> Cache:
  """Rows laid out as slots: a cache that is filled with just these."""
  return tuple(Slots(r.k.swapaxes(2, 3), r.v) for r in rows)


def capacity(cache: Cache) -> int:
  return cache[0].v.shape[2]


def take(rows: Rows, index: Array) -> Rows:
  """rows[b, :, index[b, i]] for every layer; index: int32[B, X]."""
  pick = lambda a: jnp.take_along_axis(a, index[:, None, :, None], axis=2)
  return jax.tree.map(pick, rows)


def commit(cache: Cache, rows: Rows, start: Array) -> Cache:
  """Write all rows at slots [start[b], start[b] + X) of each batch row.

  Rows past the accepted ones are written too and masked by the length, so
  that the shape is fixed; the caller leaves X free slots (a write that does
  not fit would be clamped by XLA and destroy committed rows).

  Args:
    cache: S slots a layer.
    rows: X rows a layer.
    start: int32[B].
  """
  put = jax.lax.dynamic_update_slice
  keys = jax.vmap(lambda c, r, s: put(c, r.astype(c.dtype), (0, 0, s)))
  values = jax.vmap(lambda c, r, s: put(c, r.astype(c.dtype), (0, s, 0)))
  return tuple(
    Slots(keys(c.k, r.k, start), values(c.v, r.v, start))
    for c, r in zip(cache, of_rows(rows), strict=True)
  )


def resize(cache: Cache, capacity: int) -> Cache:
  """The same rows in a cache of another capacity (grown or cut at the end)."""

  def one(a: Array, axis: int) -> Array:
    more = capacity - a.shape[axis]
    if more <= 0:
      return jax.lax.slice_in_dim(a, 0, capacity, axis=axis)
    wider = [(0, more if i == axis else 0) for i in range(a.ndim)]
    return jnp.pad(a, wider)

  return tuple(Slots(one(c.k, 3), one(c.v, 2)) for c in cache)
