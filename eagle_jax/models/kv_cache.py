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
  """Keys (after rotary embedding) and values of one layer: [B, K, X, H]."""

  k: Array
  v: Array


Cache = tuple[KV, ...]  # one a layer; the same type serves as rows


def init(
  batch: int,
  num_layers: int,
  num_kv_heads: int,
  capacity: int,
  head_size: int,
  dtype,
) -> Cache:
  """A cache of zeros; unwritten slots are masked by the row's length."""
  shape = (batch, num_kv_heads, capacity, head_size)
  return tuple(
    KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(num_layers)
  )


def capacity(cache: Cache) -> int:
  return cache[0].k.shape[2]


def take(rows: Cache, index: Array) -> Cache:
  """rows[b, :, index[b, i]] for every layer; index: int32[B, X]."""
  pick = lambda a: jnp.take_along_axis(a, index[:, None, :, None], axis=2)
  return jax.tree.map(pick, rows)


def commit(cache: Cache, rows: Cache, start: Array) -> Cache:
  """Write all rows at slots [start[b], start[b] + X) of each batch row.

  Rows past the accepted ones are written too and masked by the length, so
  that the shape is fixed; the caller leaves X free slots (a write that does
  not fit would be clamped by XLA and destroy committed rows).

  Args:
    cache: [B, K, S, H] a layer.
    rows: [B, K, X, H] a layer.
    start: int32[B].
  """
  write = jax.vmap(
    lambda c, r, s: jax.lax.dynamic_update_slice(
      c, r.astype(c.dtype), (0, s, 0)
    )
  )
  return jax.tree.map(lambda c, r: write(c, r, start), cache, rows)


def resize(cache: Cache, capacity: int) -> Cache:
  """The same rows in a cache of another capacity (grown or cut at the end)."""

  def one(a):
    S = a.shape[2]
    if capacity <= S:
      return a[:, :, :capacity]
    return jnp.pad(a, ((0, 0), (0, 0), (0, capacity - S), (0, 0)))

  return jax.tree.map(one, cache)
