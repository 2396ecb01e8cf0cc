"""One decode cycle: grow, verify, accept, commit, extend. Fixed shapes.

Names and slots are drawn in `state.py`; a row has n committed tokens and the
root x_n.

  grow    draft M - 1 nodes below x_n from r_{n-1}'s output and its children
  verify  one target pass over the M nodes at positions n + level
  accept  walk to the bonus token x_{n+a+1}
  commit  k_n .. k_{n+a}: the rows of the root and the accepted nodes
  extend  r_n .. r_{n+a} with true features; leaves the next root's children

Plain decoding is the same cycle with a tree of the root alone (no levels):
the walk takes one step, the token it finds is the next root.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax import sharding
from eagle_jax.models import kv_cache, masks
from eagle_jax.models.kv_cache import KV
from eagle_jax.speculation import tree as trees
from eagle_jax.speculation.sampling import (
  draft_children,
  gumbel,
  next_token,
)
from eagle_jax.speculation.state import ChunkOut, DecodeState, Models
from eagle_jax.speculation.tree import Tree
from eagle_jax.speculation.verify import walk


def _draft_noise(m: Models, state: DecodeState, position: Array) -> Array:
  """float32[B, W]: the shared noise of tokens at `position`, draft ids."""
  B, W = position.shape[0], m.vocabulary.shape[0]
  used = (state.sampling.temperature > 0) & (state.sampling.draft_noise > 0)
  return jax.lax.cond(
    jnp.any(used),
    lambda: gumbel(state.seeds, position, m.ends.shape[0])[:, m.vocabulary],
    lambda: jnp.zeros((B, W), jnp.float32),
  )


def _whole(m: Models, x: Array) -> Array:
  """x [B, ...] cut along the batch alone: what follows is too small to share,
  and XLA would share it, with a message for every small operation."""
  if m.mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, sharding.batch(m.mesh, "decode"))


def _children(m: Models, state: DecodeState, out: Array, position: Array):
  """(tokens, scores) [B, T, branch] of drafter outputs [B, T, D].

  position: int32[B], of the children.
  """
  logits = m.drafter.apply({"params": m.drafter_params}, out, method="logits")
  return draft_children(
    logits,
    m.spec.branch,
    m.vocabulary,
    state.sampling,
    _draft_noise(m, state, position),
    functools.partial(_whole, m),
  )


def grow(m: Models, state: DecodeState) -> Tree:
  """Draft the pool level by level and cut it to a tree.

  Level j's frontier runs in one drafter pass. Its rows see the committed
  cache, the rows of their own ancestors, and themselves (branch 2, level 3):

    committed 0..n-1 | level-1 rows 0 1 | level-2 rows 0 1 | itself
     1 1 1 ... 1 1   |        . 1       |        1 .       |   1
  """
  spec = m.spec
  root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
  levels: list[trees.Level] = []
  if spec.levels:
    levels.append(trees.first_level(state.child_tokens, state.child_scores))
  feature = state.root_feature[:, None]  # of the frontier's parents
  before = root  # tokens of the frontier's parents
  rows: list[KV] = []
  sees = None  # bool[B, width, rows so far]
  for level in range(1, spec.levels):
    with jax.named_scope(f"draft_{level}"):
      newest = levels[-1]
      chosen = trees.frontier(spec, level, newest)  # [B, width]
      pick = lambda a, i=chosen: jnp.take_along_axis(a, i, axis=1)
      tokens, scores = pick(newest.tokens), pick(newest.scores)
      parent = chosen // spec.branch  # its row in the frontier before
      if level == 1:
        fed = jnp.broadcast_to(feature, (*chosen.shape, feature.shape[-1]))
        own_tokens = jnp.broadcast_to(before, chosen.shape)
        earlier, joined = None, None
      else:
        fed = jnp.take_along_axis(feature, parent[..., None], axis=1)
        own_tokens = jnp.take_along_axis(before, parent, axis=1)
        own = jax.nn.one_hot(parent, feature.shape[1], dtype=bool)
        above = (
          []
          if sees is None
          else [jnp.take_along_axis(sees, parent[..., None], axis=1)]
        )
        sees = jnp.concatenate([*above, own], axis=-1)
        earlier = masks.Tree(sees)
        joined = jax.tree.map(lambda *a: jnp.concatenate(a, axis=2), *rows)
      positions = jnp.broadcast_to(
        (state.length + level - 1)[:, None], chosen.shape
      )
      feature, made = m.drafter.apply(
        {"params": m.drafter_params},
        m.drafter.reads(own_tokens, tokens),
        fed,
        positions,
        masks.Attend(own=masks.Itself(), earlier=earlier, length=state.length),
        state.draft_cache[0],
        joined,
        (),
      )
      rows.append(made)
      before = tokens
      child_tokens, child_scores = _children(
        m, state, feature, state.length + level + 1
      )
      levels.append(
        trees.next_level(
          tokens,
          scores,
          chosen + trees.level_start(spec, level),
          child_tokens,
          child_scores,
          m.ends,
        )
      )
  return trees.build(spec, root[:, 0], levels)


def drafter_reads(m: Models, out) -> Array:
  """What the drafter reads of a target pass."""
  return out.taps if m.target.taps else out.feature


def extend(
  m: Models,
  state: DecodeState,
  features: Array,
  next_tokens: Array,
  last: Array,
  root: Array,
):
  """Drafter rows for T newly committed tokens, from true features.

  Args:
    features: [B, T, ·] of committed tokens n .. n+T-1.
    next_tokens: int32[B, T], the token after each.
    last: int32[B], the last row that counts; later ones are padding.
    root: int32[B], position of the new root (the children follow it).

  Returns:
    the drafter cache, and (feature, child tokens, child scores) of `last`.
  """
  apply = lambda *a, **k: m.drafter.apply({"params": m.drafter_params}, *a, **k)
  T = next_tokens.shape[1]
  positions = state.length[:, None] + jnp.arange(T)
  first = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
  own_tokens = jnp.concatenate([first, next_tokens[:, :-1]], axis=1)
  feature, rows = apply(
    m.drafter.reads(own_tokens, next_tokens),
    apply(features, method="fuse"),
    positions,
    masks.Attend(own=masks.Causal(), length=state.length),
    state.draft_cache[0],
    None,
    (),
    last[:, None],
  )
  cache = kv_cache.commit(state.draft_cache, (rows,), state.length)
  tokens, scores = _children(m, state, feature, root + 1)
  return cache, (feature[:, 0], tokens[:, 0], scores[:, 0])


def _known_after(start: Array, token: Array) -> Array:
  """`start` int32[B], for XLA a function of `token` int32[B] too.

  A layer makes its own row before it reads the cache. Where nothing else puts
  the write after the read, XLA on CPU copies every layer's cache twice to be
  safe: a cycle of plain decoding (135M model) takes 1.06 times as long with
  256 slots, 1.25 times with 1,024.
  """
  return jnp.where(token < 0, 0, start)  # no id is below 0


def cycle(m: Models, state: DecodeState):
  """One cycle for all rows.

  Returns:
    the new state, new tokens int32[B, L+1], their count int32[B] (0 for
    finished rows) and accept_length int32[B].
  """
  L = m.spec.levels
  live = ~state.finished
  apply = lambda *a, **k: m.target.apply({"params": m.target_params}, *a, **k)
  with jax.named_scope("grow"):
    tree = grow(m, state)
  with jax.named_scope("verify"):
    out, rows = apply(
      tree.tokens,
      state.length[:, None] + tree.level,
      masks.Attend(own=masks.Tree(tree.ancestors), length=state.length),
      state.cache,
    )
    all_logits = None if m.lazy_head else apply(out.feature, method="logits")

  def logits_at(node: Array) -> Array:
    pick = lambda a: jnp.take_along_axis(a, node[:, None, None], axis=1)[:, 0]
    if m.lazy_head:
      return apply(pick(out.feature), method="logits")
    return pick(all_logits)

  with jax.named_scope("accept"):
    accepted = walk(
      tree,
      L,
      logits_at,
      state.seen,
      state.sampling,
      state.seeds,
      state.length,
      state.limit - state.length - 1,
      m.ends,
      live,
    )
  count = jnp.where(live, accepted.length + 1, 0)
  length = state.length + count
  with jax.named_scope("commit"):
    cache = kv_cache.commit(
      state.cache,
      kv_cache.take(rows, accepted.path),
      _known_after(state.length, accepted.tokens[:, 0]),
    )
    old = jax.vmap(lambda t, n: jax.lax.dynamic_slice(t, (n + 1,), (L + 1,)))(
      state.tokens, state.length
    )
    fresh = jnp.arange(L + 1) < count[:, None]
    tokens = jax.vmap(
      lambda t, new, n: jax.lax.dynamic_update_slice(t, new, (n + 1,))
    )(state.tokens, jnp.where(fresh, accepted.tokens, old), state.length)
  updates = {}
  if m.drafter is not None:
    with jax.named_scope("extend"):
      features = jnp.take_along_axis(
        drafter_reads(m, out), accepted.path[:, :, None], axis=1
      )
      draft_cache, (feature, child_tokens, child_scores) = extend(
        m, state, features, accepted.tokens, accepted.length, length
      )
    updates = {
      "draft_cache": draft_cache,
      "root_feature": feature,
      "child_tokens": child_tokens,
      "child_scores": child_scores,
    }
  new = state.replace(
    tokens=tokens,
    length=length,
    cache=cache,
    seen=accepted.seen,
    finished=state.finished | accepted.ended | (length + 1 >= state.limit),
    **updates,
  )
  return new, accepted.tokens, count, accepted.length


def run_chunk(
  m: Models, state: DecodeState, most: Array, size: int
) -> tuple[DecodeState, ChunkOut]:
  """Cycles until all rows finish, `most` ran, or the cache may overflow.

  Args:
    most: int32[], cycles to run at most; at most `size`.
    size: C, static bound of the output arrays.

  Returns:
    the new state, and the out arrays for the host.
  """
  B = state.length.shape[0]
  step = m.spec.levels + 1
  capacity = kv_cache.capacity(state.cache)

  def go_on(carry):
    i, state, _ = carry
    # Finished rows count too: a cycle writes behind every row's length.
    fits = jnp.max(state.length) + step <= capacity
    return (i < most) & fits & ~jnp.all(state.finished)

  def body(carry):
    i, state, out = carry
    live = ~state.finished
    state, tokens, count, accept = cycle(m, state)
    put = jax.vmap(
      lambda buffer, new, at: jax.lax.dynamic_update_slice(buffer, new, (at,))
    )
    out = out.replace(
      # entries past `count` are overwritten by the next cycle
      tokens=put(out.tokens, tokens, out.count),
      count=out.count + count,
      accept_lengths=out.accept_lengths.at[:, i].set(
        jnp.where(live, accept, out.accept_lengths[:, i])
      ),
      cycles=out.cycles + live,
    )
    return i + 1, state, out

  zeros = jnp.zeros(B, jnp.int32)
  out = ChunkOut(
    tokens=jnp.zeros((B, size * step), jnp.int32),
    count=zeros,
    accept_lengths=jnp.zeros((B, size), jnp.int32),
    cycles=zeros,
    length=zeros,
    finished=jnp.zeros(B, bool),
  )
  _, state, out = jax.lax.while_loop(
    go_on, body, (jnp.zeros((), jnp.int32), state, out)
  )
  # + 0 keeps the outputs from aliasing the state, which is donated next
  return state, out.replace(
    length=state.length + 0, finished=state.finished | False
  )


def prefill(
  m: Models, state: DecodeState, count: Array, last: Array, T: int
) -> DecodeState:
  """Commit the next `count` prompt tokens of each row, T at most.

  The rows' tokens are already in `state.tokens`. A row whose prompt ends here
  gets its first token (its root) and the root's children.

  Args:
    count: int32[B], 0 leaves a row as it is.
    last: bool[B], the prompt ends in this chunk.
    T: static length of the chunk; length + T must fit the capacity.
  """
  apply = lambda *a, **k: m.target.apply({"params": m.target_params}, *a, **k)
  B = count.shape[0]
  window = jax.vmap(lambda t, n: jax.lax.dynamic_slice(t, (n,), (T,)))
  positions = state.length[:, None] + jnp.arange(T)
  out, rows = apply(
    window(state.tokens, state.length),
    positions,
    masks.Attend(own=masks.Causal(), length=state.length),
    state.cache,
  )
  end = jnp.maximum(count - 1, 0)
  length = state.length + count
  final = jnp.take_along_axis(out.feature, end[:, None, None], axis=1)
  token = next_token(
    apply(final[:, 0], method="logits"),
    state.seen,
    state.sampling,
    state.seeds,
    length,
  )
  every = jnp.arange(B)
  tokens = state.tokens.at[every, length].set(
    jnp.where(last, token, state.tokens[every, length])
  )
  updates = {}
  if m.drafter is not None:
    draft_cache, made = extend(
      m,
      state,
      drafter_reads(m, out),
      window(tokens, state.length + 1),
      end,
      length,
    )
    old = (state.root_feature, state.child_tokens, state.child_scores)
    keep = lambda new, was: jnp.where(last[:, None], new, was)
    feature, child_tokens, child_scores = map(keep, made, old)
    updates = {
      "draft_cache": draft_cache,
      "root_feature": feature,
      "child_tokens": child_tokens,
      "child_scores": child_scores,
    }
  done = last & (m.ends[token] | (length + 1 >= state.limit))
  return state.replace(
    tokens=tokens,
    length=length,
    cache=kv_cache.commit(state.cache, rows, _known_after(state.length, token)),
    seen=state.seen.at[every, token].max(last),
    finished=jnp.where(last, done, state.finished),
    **updates,
  )
