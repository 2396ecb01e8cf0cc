"""Acceptance: a walk down the tree, led by the target's own tokens.

At each node the target decides by `next_token`, the function and the shape
that plain decoding uses. Is its token among the node's children, the walk
moves there; else that token is the bonus and the walk ends. Nothing random or
sorted ever spans the tree, and penalties see the path that was really taken.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle_jax.speculation.sampling import SamplingParams, next_token
from eagle_jax.speculation.tree import Tree


@struct.dataclass
class Accepted:
  """What one walk found.

    path    0  2  5  .      nodes passed, the root first     int32[B, L+1]
    tokens  7  9  4  .      the target's token after each    int32[B, L+1]
    length  2               accept_length a: drafts accepted   int32[B]

  tokens[:, :a] are the accepted drafts, tokens[:, a] the bonus token. Entries
  past a are unspecified.
  seen: bool[B, V], with the new tokens marked.
  ended: bool[B], the last token is an end id.
  """

  path: Array
  tokens: Array
  length: Array
  seen: Array
  ended: Array


def walk(
  tree: Tree,
  levels: int,
  logits_at: Callable[[Array], Array],
  seen: Array,
  params: SamplingParams,
  seeds: Array,
  root_position: Array,
  room: Array,
  ends: Array,
  live: Array,
) -> Accepted:
  """Follow the target's tokens through the tree.

  Args:
    levels: L, the most drafts that can be accepted.
    logits_at: node numbers int32[B] -> the target's logits float32[B, V].
    root_position: int32[B], the root's absolute position.
    room: int32[B], how many more tokens the row may have; at least 1 where
      live.
    ends: bool[V], end ids: nothing after one is accepted.
    live: bool[B]; other rows walk nowhere and report unspecified tokens.
  """
  B = tree.tokens.shape[0]
  rows = jnp.arange(B)

  def moving(carry):
    step, moving, *_ = carry
    return (step <= levels) & jnp.any(moving)

  def move(carry):
    step, moving, node, path, tokens, length, seen, ended = carry
    token = next_token(
      logits_at(node), seen, params, seeds, root_position + step + 1
    )
    tokens = tokens.at[:, step].set(jnp.where(moving, token, tokens[:, step]))
    seen = seen.at[rows, token].max(moving)
    end = ends[token]
    ended = jnp.where(moving, end, ended)
    child = (
      (tree.parent == node[:, None])
      & (tree.tokens == token[:, None])
      & tree.valid
    )
    child = child.at[:, 0].set(False)  # the root is its own parent
    moving &= child.any(-1) & ~end & (step + 1 < room) & (step < levels)
    node = jnp.where(moving, jnp.argmax(child, -1).astype(jnp.int32), node)
    ahead = jnp.minimum(step + 1, levels)
    path = path.at[:, ahead].set(jnp.where(moving, node, path[:, ahead]))
    length += moving
    return step + 1, moving, node, path, tokens, length, seen, ended

  none = jnp.zeros(B, jnp.int32)
  blank = jnp.zeros((B, levels + 1), jnp.int32)
  *_, path, tokens, length, seen, ended = jax.lax.while_loop(
    moving,
    move,
    (
      jnp.zeros((), jnp.int32),
      live,
      none,
      blank,
      blank,
      none,
      seen,
      jnp.zeros(B, bool),
    ),
  )
  return Accepted(path, tokens, length, seen, ended)
