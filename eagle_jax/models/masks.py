"""Who sees whom, as data.

One forward call has T query rows and up to four blocks of keys:

  prefix   S rows of the cache, committed earlier; slot == position
  earlier  X rows made earlier in this cycle or training step, not committed
  steps    R rows that only the same query row sees (unrolled training)
  own      the T rows of this very call

`Attend` says which of them a query sees; one softmax runs over all blocks.

  prefill           plain, M = 1    verify, M = 4       draft level 2
  own: Causal       own: Tree       own: Tree           earlier, own: Itself

  prefix | own      prefix | own    prefix | own        prefix | earl | own
  1 1 0  | 1 . .    1 1 0  | 1      1 1 0  | 1 . . .    1 1 0  | 1 .  | 1 .
  1 1 0  | 1 1 .                    1 1 0  | 1 1 . .    1 1 0  | . 1  | . 1
  1 1 0  | 1 1 1                    1 1 0  | 1 . 1 .
                                    1 1 0  | 1 1 . 1    (node 3 under 1)

with length = 2 of S = 3 cache slots committed.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class Causal:
  """Row t sees rows 0..t, of its own document where rows are packed.

  documents: int32[B, T] or None; equal ids share a document.
  positions: int32[B, T] of the rows seen, where a window is to count from
    them and the queries stand elsewhere (a later unrolled step).
  """

  documents: Array | None = None
  positions: Array | None = None


@struct.dataclass
class Tree:
  """Row t sees the rows that `bits` marks: its ancestors and itself.

  bits: bool[B, T, X].
  """

  bits: Array


@struct.dataclass
class Itself:
  """Row t sees row t alone (a draft level: siblings do not see each other)."""


@struct.dataclass
class Attend:
  """Who sees whom in one call.

  own: Causal, Tree or Itself, for the T rows of the call.
  earlier: Causal or Tree, for the X rows handed in as `earlier`; None if none.
  length: int32[B] committed rows of the cache, all seen; None = no cache.
  window: queries see only keys less than `window` positions back.
  """

  own: Causal | Tree | Itself
  earlier: Causal | Tree | None = None
  length: Array | None = None
  window: int | None = struct.field(pytree_node=False, default=None)


def for_queries(attend: Attend, positions: Array, wanted: Array) -> Attend:
  """`attend` where only some of the call's rows are queries; keys are all.

    own: Causal, T = 4       wanted = [3]      wanted = [1, 3]
      1 . . .                 1 1 1 1            1 1 . .
      1 1 . .                                    1 1 1 1
      1 1 1 .
      1 1 1 1

  Args:
    attend: of a cache and `own` rows, Causal or Tree.
    positions: int32[B, T] of all rows.
    wanted: int32[B, Q], which rows are queries.
  """
  if attend.earlier is not None or isinstance(attend.own, Itself):
    raise ValueError("wanted rows go with a cache and own rows, no others")
  visible = block_mask(attend.own, positions, attend.window)
  bits = jnp.take_along_axis(visible, wanted[..., None], axis=1)
  return attend.replace(own=Tree(bits))


def prefix_mask(attend: Attend, positions: Array, S: int) -> Array:
  """bool[B, 1 or T, S]: the committed slots that each query sees."""
  slots = jnp.arange(S)
  visible = slots[None, None] < attend.length[:, None, None]
  if attend.window is not None:
    visible &= positions[:, :, None] - slots[None, None] < attend.window
  return visible


def block_mask(
  who: Causal | Tree, positions: Array, window: int | None
) -> Array:
  """bool[B or 1, T, X] for the `own` or the `earlier` block.

  positions: int32[B, T] of the queries. Window 3, keys at 0..3, and queries
  two steps on, at 2..5:

    2   1 . . .
    3   . 1 . .
    4   . . 1 .
    5   . . . 1

  A tree is not cut by the window: its few levels are seen whole, even where a
  window is shorter.
  """
  if isinstance(who, Tree):
    return who.bits
  T = positions.shape[1]
  rows = jnp.arange(T)
  visible = (rows[:, None] >= rows[None, :])[None]
  if who.documents is not None:
    visible &= who.documents[:, :, None] == who.documents[:, None, :]
  if window is not None:
    keys = positions if who.positions is None else who.positions
    visible &= positions[:, :, None] - keys[:, None, :] < window
  return visible
