"""The cache against loops over single rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models import kv_cache
from eagle_jax.models.kv_cache import KV, Slots

B, K, H, LAYERS = 3, 2, 4, 2


def filled(X: int, seed: int, dtype=jnp.float32) -> kv_cache.Rows:
  rng = np.random.default_rng(seed)
  draw = lambda: jnp.asarray(rng.standard_normal((B, K, X, H)), dtype)
  return tuple(KV(draw(), draw()) for _ in range(LAYERS))


def full(S: int, seed: int, dtype=jnp.float32) -> kv_cache.Cache:
  return kv_cache.of_rows(filled(S, seed, dtype))


def by_row(layer: KV | Slots) -> list[jax.Array]:
  """Keys and values, both [B, K, X, H]."""
  k = layer.k.swapaxes(2, 3) if isinstance(layer, Slots) else layer.k
  return [k, layer.v]


def pairs(*groups: kv_cache.Cache | kv_cache.Rows):
  """The arrays that lie at the same place of several caches or rows."""
  leaves = [[a for layer in c for a in by_row(layer)] for c in groups]
  assert len(leaves[0]) == 2 * LAYERS
  return [tuple(map(np.asarray, group)) for group in zip(*leaves, strict=True)]


def test_init_is_empty_and_typed():
  cache = kv_cache.init(B, LAYERS, K, 7, H, jnp.bfloat16)
  assert kv_cache.capacity(cache) == 7
  for (a,) in pairs(cache):
    assert a.shape == (B, K, 7, H)
    assert a.dtype == jnp.bfloat16
    assert not a.any()


def test_take_picks_rows_of_each_batch_row():
  """Repeats and any order are fine; batch rows do not mix."""
  rows = filled(5, 0)
  index = np.array([[0, 2, 4], [1, 1, 0], [4, 3, 3]])
  for got, a in pairs(kv_cache.take(rows, jnp.asarray(index)), rows):
    assert got.shape == (B, K, 3, H)
    for b, k, i in np.ndindex(B, K, 3):
      np.testing.assert_array_equal(got[b, k, i], a[b, k, index[b, i]])


# The last start leaves exactly the room needed: capacity 9, 4 rows.
@pytest.mark.parametrize("start", [[0, 0, 0], [2, 0, 4], [5, 5, 5], [0, 5, 1]])
def test_commit_writes_its_rows_and_no_others(start):
  cache, rows = full(9, 1), filled(4, 2)
  done = kv_cache.commit(cache, rows, jnp.array(start))
  for got, before, new in pairs(done, cache, rows):
    wanted = before.copy()
    for b, i in np.ndindex(B, 4):
      wanted[b, :, start[b] + i] = new[b, :, i]
    np.testing.assert_array_equal(got, wanted)


def test_commit_of_an_accepted_path_is_the_picture():
  """cache [k0 k1 k2 . . .], rows r0..r3, path (0 2) -> [k0 k1 k2 r0 r2 .]."""
  cache, rows = full(6, 3), filled(4, 4)
  path = jnp.array([[0, 2]] * B)
  done = kv_cache.commit(cache, kv_cache.take(rows, path), jnp.full(B, 3))
  for got, k, r in pairs(done, cache, rows):
    slots = [k[:, :, 0], k[:, :, 1], k[:, :, 2], r[:, :, 0], r[:, :, 2]]
    np.testing.assert_array_equal(got[:, :, :5], np.stack(slots, 2))


def test_commit_keeps_the_type_of_the_cache():
  cache, rows = full(6, 5, jnp.bfloat16), filled(2, 6)
  done = kv_cache.commit(cache, rows, jnp.zeros(B, jnp.int32))
  for got, new in pairs(done, rows):
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[:, :, :2], new.astype(jnp.bfloat16))


@pytest.mark.parametrize("capacity", [3, 6, 11])
def test_resize_keeps_the_first_rows(capacity):
  cache = full(6, 7)
  for got, a in pairs(kv_cache.resize(cache, capacity), cache):
    wanted = np.zeros((B, K, capacity, H), np.float32)
    kept = min(6, capacity)
    wanted[:, :, :kept] = a[:, :, :kept]
    np.testing.assert_array_equal(got, wanted)
