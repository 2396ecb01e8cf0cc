"""What a row carries from cycle to cycle, and how rows start and stop.

What lies where, for a row of length n (its root x_n is not committed yet):

  tokens        x_0 x_1 ... x_{n-1} x_n  .  .      x_n: the root
  target cache  k_0 k_1 ... k_{n-1}  .   .  .      one slot a committed token
  drafter cache r_0 r_1 ... r_{n-1}  .   .  .      r_t: (feature t, token t+1)
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh

from eagle_jax.models import kv_cache
from eagle_jax.models.kv_cache import Cache
from eagle_jax.speculation.sampling import SamplingParams, one_setting
from eagle_jax.speculation.tree import TreeSpec


@struct.dataclass
class Models:
  """The two networks, their weights, and the static shape of a cycle.

  target, drafter: modules (drafter None: plain decoding).
  spec: the tree. lazy_head: the head reads only the nodes that the walk
  visits, one by one; else one matmul over all nodes (`loading.lazy_head` says
  when).
  mesh: what everything lies on; None = one device.
  vocabulary: int32[W], draft id -> target id. ends: bool[V], end ids.
  """

  target: object = struct.field(pytree_node=False)
  drafter: object = struct.field(pytree_node=False)
  spec: TreeSpec = struct.field(pytree_node=False)
  lazy_head: bool = struct.field(pytree_node=False)
  mesh: Mesh | None = struct.field(pytree_node=False)
  target_params: dict
  drafter_params: dict | None
  vocabulary: Array | None
  ends: Array


@struct.dataclass
class DecodeState:
  """Everything a row carries from cycle to cycle; donated to each chunk.

  tokens: int32[B, width], committed tokens and the root; width leaves room
    for a cycle or a prefill chunk behind the context, since XLA clamps.
  length: int32[B], n: tokens in both caches; tokens[n] is the root.
  cache, draft_cache: key/value slots, capacity S; () without a drafter.
  root_feature: [B, D], the drafter's prediction for the root's row (the true
    feature is unknown until the root is verified).
  child_tokens, child_scores: [B, branch], the root's drafted children.
  seen: bool[B, V], ids in the prompt and the answer (for the penalty).
  seeds: uint32[B, 2]. sampling: one value a row.
  limit: int32[B], most tokens the row may have, the prompt included.
  finished: bool[B].
  """

  tokens: Array
  length: Array
  cache: Cache
  draft_cache: Cache
  root_feature: Array
  child_tokens: Array
  child_scores: Array
  seen: Array
  seeds: Array
  sampling: SamplingParams
  limit: Array
  finished: Array


@struct.dataclass
class ChunkOut:
  """What the host reads of a chunk: fresh arrays, no alias of the state.

  tokens: int32[B, C * (L + 1)], new tokens, `count` of them.
  accept_lengths: int32[B, C], `cycles` of them.
  count, cycles, length: int32[B]. finished: bool[B].
  """

  tokens: Array
  count: Array
  accept_lengths: Array
  cycles: Array
  length: Array
  finished: Array


def begin(
  m: Models,
  state: DecodeState,
  prompts: Array,
  prompt_lengths: Array,
  kept: Array,
  seeds: Array,
  sampling: SamplingParams,
  limit: Array,
) -> DecodeState:
  """Put new prompts into the rows; `kept` leading tokens stay committed.

  Args:
    prompts: int32[B, width of state.tokens], padded on the right.
    prompt_lengths: int32[B]; 0 marks an empty row (finished at once).
    kept: int32[B], committed tokens that the new prompt shares, less than its
      length: their cache slots are used again.
  """
  B, width = prompts.shape
  inside = jnp.arange(width) < prompt_lengths[:, None]
  seen = jnp.zeros((B, m.ends.shape[0]), bool)
  seen = seen.at[jnp.arange(B)[:, None], prompts].max(inside)
  return state.replace(
    tokens=prompts,
    length=kept,
    seen=seen,
    seeds=seeds,
    sampling=sampling,
    limit=limit,
    finished=prompt_lengths == 0,
  )


def init_state(m: Models, B: int, width: int, capacity: int) -> DecodeState:
  """An empty state: every row finished, no slot committed."""
  t, spec = m.target.config, m.spec
  cache = lambda c, layers: kv_cache.init(
    B, layers, c.num_kv_heads, capacity, c.head_size, c.dtype
  )
  full = lambda value, dtype: jnp.full(B, value, dtype)
  d = m.drafter.config if m.drafter is not None else None
  return DecodeState(
    tokens=jnp.zeros((B, width), jnp.int32),
    length=full(0, jnp.int32),
    cache=cache(t, t.num_layers),
    draft_cache=cache(d, 1) if d else (),
    root_feature=jnp.zeros((B, d.hidden_size if d else 0), t.dtype),
    child_tokens=jnp.zeros((B, spec.branch), jnp.int32),
    child_scores=jnp.zeros((B, spec.branch), jnp.float32),
    seen=jnp.zeros((B, t.vocab_size), bool),
    seeds=jnp.zeros((B, 2), jnp.uint32),
    sampling=one_setting(B, 0.0, 0.0),
    limit=full(0, jnp.int32),
    finished=full(True, bool),
  )


def resize(state: DecodeState, capacity: int) -> DecodeState:
  """The state with caches of another capacity."""
  return state.replace(
    cache=kv_cache.resize(state.cache, capacity),
    draft_cache=kv_cache.resize(state.draft_cache, capacity),
  )


def look(state: DecodeState) -> ChunkOut:
  """The roots, before any cycle ran: the tokens that prefill gave."""
  B = state.length.shape[0]
  root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
  zeros = jnp.zeros(B, jnp.int32)
  return ChunkOut(
    tokens=root,
    count=zeros + 1,
    accept_lengths=jnp.zeros((B, 0), jnp.int32),
    cycles=zeros,
    length=state.length,
    finished=state.finished,
  )


def stop_rows(state: DecodeState, stop: Array, length: Array) -> DecodeState:
  """Finish the marked rows, cut back to `length` committed tokens.

  For stops that only the host can see. The slots behind stay written and
  unread; `seen` is made anew by `begin`.

  Args:
    stop: bool[B]. length: int32[B].
  """
  return state.replace(
    finished=state.finished | stop,
    length=jnp.where(stop, jnp.minimum(length, state.length), state.length),
  )


def put_row(state: DecodeState, one: DecodeState, row: Array) -> DecodeState:
  """`state` with the only row of `one` in place of row `row`.

    state  a a a a a    one  x x x       row 1: x x x b b
           b b b b b
           c c c c c

  The caches of `one` may be shorter: slots behind a row's length are unread.

  Args:
    row: int32[].
  """

  def put(whole, part):
    start = (row, *(0,) * (whole.ndim - 1))
    return jax.lax.dynamic_update_slice(whole, part, start)

  return jax.tree.map(put, state, one)
