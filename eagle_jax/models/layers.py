"""The pieces that targets and drafters share. Pure; softmax in float32."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax.config import LayerConfig, TargetConfig
from eagle_jax.models import masks
from eagle_jax.models.kv_cache import KV, Slots

_INIT = nn.initializers.normal(0.02)


def precision(dtype) -> jax.lax.Precision | None:
  """float32 means float32: TPUs and Hopper default to fewer bits."""
  exact = jnp.dtype(dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if exact else None


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """Root-mean-square norm (arXiv 1910.07467), computed in float32."""
  wide = x.astype(jnp.float32)
  variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * scale.astype(
    x.dtype
  )


def rope_frequencies(config: LayerConfig) -> tuple[np.ndarray, float]:
  """Rotary frequencies float32[H/2] and the factor on cos and sin.

  Scalings: linear (arXiv 2306.15595), llama3 (Llama 3.1's low-frequency
  stretch), yarn (arXiv 2309.00071).
  """
  H, theta, scaling = (
    config.head_size,
    config.rope_theta,
    config.rope_scaling,
  )
  freq = 1.0 / theta ** (np.arange(0, H, 2, dtype=np.float32) / H)
  if scaling is None:
    return freq.astype(np.float32), 1.0
  if scaling.kind == "linear":
    return (freq / scaling.factor).astype(np.float32), 1.0
  original = scaling.original_max_positions
  if scaling.kind == "llama3":
    turns = original * freq / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    freq = keep * freq + (1 - keep) * freq / scaling.factor
    return freq.astype(np.float32), 1.0
  if scaling.kind == "yarn":

    def dimension(turns: float) -> float:
      """Where a pair turns that often over the original context."""
      return (
        H * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
      )

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), H - 1)
    ramp = (np.arange(H // 2) - low) / max(high - low, 0.001)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    freq = keep * freq + (1 - keep) * freq / scaling.factor
    return freq.astype(np.float32), scaling.attention_factor
  raise ValueError(
    f"rope scaling {scaling.kind!r} is unknown: linear, llama3 and yarn are"
    " supported"
  )


def rotary(positions: Array, config: LayerConfig) -> tuple[Array, Array]:
  """(cos, sin) float32[B, T, 1, H/2] of `positions` int32[B, T], for `rotate`.

  Made once a pass: without the barrier XLA moves the cosines into each layer's
  own loops and computes them for every head and layer anew.
  """
  freq, factor = rope_frequencies(config)
  angles = positions[..., None].astype(jnp.float32) * freq  # [B, T, H/2]
  cos = (jnp.cos(angles) * factor)[:, :, None]
  sin = (jnp.sin(angles) * factor)[:, :, None]
  return jax.lax.optimization_barrier((cos, sin))


def rotate(x: Array, turn: tuple[Array, Array]) -> Array:
  """Rotary embedding (arXiv 2104.09864), rotate-half pairing.

  Args:
    x: [B, T, heads, H].
    turn: `rotary` of the rows' positions.
  """
  cos, sin = turn
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(
    x.dtype
  )


def attention(
  q: Array,
  own: KV,
  positions: Array,
  attend: masks.Attend,
  prefix: Slots | None,
  earlier: KV | None,
  steps: tuple[KV, ...],
) -> Array:
  """One softmax over all blocks of keys that a query sees.

  Args:
    q: [B, T, N, H] after rotary embedding.
    own: rows of this call, [B, K, T, H].
    positions: int32[B, T] of the queries.
    attend: who sees whom.
    prefix: the layer's cache, S slots, or None.
    earlier: uncommitted rows [B, K, X, H], or None.
    steps: rows [B, K, T, H] each, row t seen by query t alone.

  Returns:
    [B, T, N, H].
  """
  B, T, N, H = q.shape
  K = own.k.shape[1]
  exact = precision(q.dtype)
  q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)  # B K G T H
  scale = H**-0.5

  def against(keys: Array, axes: str, visible: Array) -> Array:
    scores = jnp.einsum(
      f"BKGTH,{axes}->BKGTS",
      q,
      keys,
      precision=exact,
      preferred_element_type=jnp.float32,
    )
    return jnp.where(visible[:, None, None], scores * scale, -jnp.inf)

  def against_same_row(keys: Array) -> Array:
    scores = jnp.einsum(
      "BKGTH,BKTH->BKGT",
      q,
      keys,
      precision=exact,
      preferred_element_type=jnp.float32,
    )
    return scores[..., None] * scale

  def over(weights: Array, values: Array) -> Array:
    return jnp.einsum(
      "BKGTS,BKSH->BKGTH",
      weights.astype(values.dtype),
      values,
      precision=exact,
      preferred_element_type=jnp.float32,
    )

  def over_same_row(weights: Array, values: Array) -> Array:
    return (weights * values[:, :, None]).astype(jnp.float32)

  # (scores, how their weights meet the values, the values) a block
  blocks = []
  if attend.length is not None:
    visible = masks.prefix_mask(attend, positions, prefix.v.shape[2])
    blocks.append((against(prefix.k, "BKHS", visible), over, prefix.v))
  if attend.earlier is not None:
    visible = masks.block_mask(attend.earlier, positions, attend.window)
    blocks.append((against(earlier.k, "BKSH", visible), over, earlier.v))
  for row in steps:
    blocks.append((against_same_row(row.k), over_same_row, row.v))
  if isinstance(attend.own, masks.Itself):
    blocks.append((against_same_row(own.k), over_same_row, own.v))
  else:
    visible = masks.block_mask(attend.own, positions, attend.window)
    blocks.append((against(own.k, "BKSH", visible), over, own.v))

  # The softmax's division comes last, over H columns instead of all keys. Every
  # query sees at least itself, so that no peak is -inf.
  peak = jax.lax.stop_gradient(
    functools.reduce(
      jnp.maximum,
      [jnp.max(scores, axis=-1, keepdims=True) for scores, _, _ in blocks],
    )
  )
  total, out = 0.0, 0.0
  for scores, meet, values in blocks:
    weights = jnp.exp(scores - peak)
    total += jnp.sum(weights, axis=-1, keepdims=True)
    out += meet(weights, values)
  out /= total
  out = out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
  return out.astype(q.dtype)


class Dense(nn.Module):
  """x @ kernel (+ bias); kernel [in, out]."""

  features: int
  dtype: str
  use_bias: bool

  @nn.compact
  def __call__(self, x: Array) -> Array:
    kernel = self.param("kernel", _INIT, (x.shape[-1], self.features))
    y = jnp.matmul(
      x, kernel.astype(self.dtype), precision=precision(self.dtype)
    )
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, (self.features,))
      y += bias.astype(self.dtype)
    return y


class Head(nn.Module):
  """float32 scores of a vocabulary; kernel [D, V]."""

  num_ids: int
  dtype: str

  @nn.compact
  def __call__(self, x: Array) -> Array:
    kernel = self.param("kernel", _INIT, (x.shape[-1], self.num_ids))
    return jnp.matmul(
      x,
      kernel.astype(self.dtype),
      precision=precision(self.dtype),
      preferred_element_type=jnp.float32,
    )


class BlockedHead(nn.Module):
  """A `Head` kept in blocks of columns, for a few rows of x on a CPU:

    block_0 [D, 1536] | block_1 [D, 1536] | ... | the last one, what is left

  XLA's Eigen path plans badly for few rows and very many columns: 2 to 6 rows
  of D 576 against 49,152 columns take 30 ms (131 ms against the transposed
  table, 20 ms with the table as the left operand) and 7 ms in such blocks;
  one row takes 5.5 ms however it is laid out, and from about 24 rows on blocks
  are slower.
  """

  num_ids: int
  dtype: str

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scores = [
      Head(stop - start, self.dtype, name=f"block_{i}")(x)
      for i, (start, stop) in enumerate(column_blocks(self.num_ids))
    ]
    return jnp.concatenate(scores, axis=-1)


HEAD_BLOCK = 1536  # columns


def column_blocks(num_ids: int) -> list[tuple[int, int]]:
  """(start, stop) of each block of a `BlockedHead`."""
  starts = range(0, num_ids, HEAD_BLOCK)
  return [(s, min(s + HEAD_BLOCK, num_ids)) for s in starts]


class RMSNorm(nn.Module):
  eps: float

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    return rms_norm(x, scale, self.eps)


class Embed(nn.Module):
  """A table [V, D]: rows for ids in; scores against all rows out, where the
  head is tied to it."""

  num_rows: int
  width: int
  dtype: str

  def setup(self):
    self.embedding = self.param("embedding", _INIT, (self.num_rows, self.width))

  def __call__(self, ids: Array) -> Array:
    return self.embedding[ids].astype(self.dtype)

  def scores(self, x: Array) -> Array:
    """float32[..., V]: x against every row (the transposed table).

    On CPU the table is the left operand: XLA's Eigen path takes 20 ms instead
    of 142 for 2 to 6 rows of x and 53 instead of 62 for 64 (V 49,152, D 576).
    """
    table = self.embedding.astype(self.dtype)
    exact = {
      "precision": precision(self.dtype),
      "preferred_element_type": jnp.float32,
    }

    def table_first(x: Array, table: Array) -> Array:
      rows = x.reshape(-1, x.shape[-1])
      scores = jnp.einsum("VD,XD->VX", table, rows, **exact)
      # else XLA swaps the operands back to save the transposition
      scores = jax.lax.optimization_barrier(scores)
      return scores.T.reshape(*x.shape[:-1], -1)

    return jax.lax.platform_dependent(
      x,
      table,
      cpu=table_first,
      default=lambda x, t: jnp.einsum("...D,VD->...V", x, t, **exact),
    )


class Attention(nn.Module):
  """Grouped-query self-attention; returns its output and the rows it made.

  turn: `rotary` of the positions.
  wanted: int32[B, Q], the rows whose output is returned, [B, Q, D], where the
    others are only seen; None = all T.
  joined: one product makes q, k and v, their columns side by side
  (`join_qkv`): a CPU takes 10% less for a pass of 4 rows, 3% less for one.
  """

  config: LayerConfig
  joined: bool = False

  @nn.compact
  def __call__(
    self,
    x: Array,
    positions: Array,
    turn: tuple[Array, Array],
    attend: masks.Attend,
    prefix: Slots | None,
    earlier: KV | None,
    steps: tuple[KV, ...],
    wanted: Array | None = None,
  ) -> tuple[Array, KV]:
    c = self.config
    B, T, _ = x.shape

    def heads(name: str, count: int) -> Array:
      y = Dense(count * c.head_size, c.dtype, c.qkv_bias, name=name)(x)
      return y.reshape(B, T, count, c.head_size)

    N, K = c.num_heads, c.num_kv_heads
    if self.joined:
      made = heads("qkv_proj", N + 2 * K)
      q, k, v = made[:, :, :N], made[:, :, N : N + K], made[:, :, N + K :]
    else:
      q, k, v = heads("q_proj", N), heads("k_proj", K), heads("v_proj", K)
    if c.qk_norm:
      q = RMSNorm(c.norm_eps, name="q_norm")(q)
      k = RMSNorm(c.norm_eps, name="k_norm")(k)
    q = rotate(q, turn)
    k = rotate(k, turn)
    own = KV(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    if wanted is not None:
      attend = masks.for_queries(attend, positions, wanted)
      q = jnp.take_along_axis(q, wanted[..., None, None], axis=1)
      positions = jnp.take_along_axis(positions, wanted, axis=1)
    out = attention(q, own, positions, attend, prefix, earlier, steps)
    out = out.reshape(B, -1, c.num_heads * c.head_size)
    return Dense(c.hidden_size, c.dtype, False, name="o_proj")(out), own


def join_qkv(attention: dict) -> dict:
  """Parameters of an `Attention` as one that is `joined` reads them:

  qkv_proj/kernel [D, (N + 2 K) H]   q_proj | k_proj | v_proj
  """
  rest = dict(attention)
  parts = [rest.pop(f"{name}_proj") for name in "qkv"]
  joined = {n: jnp.concatenate([p[n] for p in parts], -1) for n in parts[0]}
  return rest | {"qkv_proj": joined}


class MLP(nn.Module):
  """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

  config: LayerConfig

  @nn.compact
  def __call__(self, x: Array) -> Array:
    c = self.config
    gate = Dense(c.mlp_size, c.dtype, False, name="gate_proj")(x)
    up = Dense(c.mlp_size, c.dtype, False, name="up_proj")(x)
    return Dense(c.hidden_size, c.dtype, False, name="down_proj")(
      nn.silu(gate) * up
    )


class ExpertDense(nn.Module):
  """A matrix an expert, [E, in, out], each on its own rows of x."""

  num_experts: int
  features: int
  dtype: str

  @nn.compact
  def __call__(self, x: Array, sizes: Array) -> Array:
    """x: [R, in], the rows of expert 0 first, then of 1, ..; sizes: int32[E],
    rows an expert."""
    shape = (self.num_experts, x.shape[-1], self.features)
    kernel = self.param("kernel", _INIT, shape)
    return jax.lax.ragged_dot(
      x, kernel.astype(self.dtype), sizes, precision=precision(self.dtype)
    )


class Experts(nn.Module):
  """E SwiGLU mlps side by side (`MLP`), on rows sorted by expert."""

  config: TargetConfig

  @nn.compact
  def __call__(self, x: Array, sizes: Array) -> Array:
    c = self.config
    dense = lambda name, width: ExpertDense(
      c.num_experts, width, c.dtype, name=name
    )
    h = nn.silu(dense("gate_proj", c.mlp_size)(x, sizes))
    h *= dense("up_proj", c.mlp_size)(x, sizes)
    return dense("down_proj", c.hidden_size)(h, sizes)


class MoE(nn.Module):
  """Mixture of experts (arXiv 2401.04088), dropless: a token always goes
  through its k best experts, whatever tokens are beside it, so that siblings
  in a tree never change one another.

    tokens            a        b        c        k = 2, E = 3
    experts          0 2      2 1      0 1
    sorted     expert 0: a c   expert 1: b c   expert 2: a b
    sizes            2              2              2
  """

  config: TargetConfig

  @nn.compact
  def __call__(self, x: Array) -> Array:
    c = self.config
    k = c.experts_per_token
    rows = x.reshape(-1, x.shape[-1])
    logits = Dense(c.num_experts, c.dtype, False, name="router")(rows)
    chance = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(chance, k)  # [R, k]
    if c.norm_expert_weights:
      weights /= jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts)
    made = Experts(c, name="experts")(rows[order // k], sizes.astype(jnp.int32))
    made = made[jnp.argsort(order)].reshape(*chosen.shape, -1)  # [R, k, D]
    out = jnp.sum(made * weights[..., None].astype(x.dtype), axis=1)
    return out.reshape(x.shape)
