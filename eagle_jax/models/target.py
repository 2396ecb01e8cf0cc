"""The target: a decoder-only transformer of the Llama shape."""

import math

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle_jax.config import TargetConfig
from eagle_jax.models import layers, masks
from eagle_jax.models.kv_cache import KV, Cache, Rows, Slots


@struct.dataclass
class TargetOut:
  """What a pass leaves for the head and for a drafter.

  feature: [B, T, D] after the final norm: the head's input, what EAGLE-1/2
    read.
  taps: [B, T, taps * D], the inputs of the tapped layers side by side, what
    EAGLE-3 reads; width 0 without taps.
  """

  feature: Array
  taps: Array


class DecoderLayer(nn.Module):
  config: TargetConfig
  joined: bool

  @nn.compact
  def __call__(
    self,
    x: Array,
    positions: Array,
    turn: tuple[Array, Array],
    attend: masks.Attend,
    prefix: Slots | None,
  ) -> tuple[Array, KV]:
    c = self.config
    h = layers.RMSNorm(c.norm_eps, name="input_layernorm")(x)
    h, rows = layers.Attention(c, self.joined, name="self_attn")(
      h, positions, turn, attend, prefix, None, ()
    )
    x += h
    h = layers.RMSNorm(c.norm_eps, name="post_attention_layernorm")(x)
    mlp = layers.MoE if c.num_experts else layers.MLP
    return x + mlp(c, name="mlp")(h), rows


FEW_ROWS = range(2, 25)  # rows of features that a `BlockedHead` is better for


def cpu_layout(params: dict, config: TargetConfig) -> dict:
  """`params` as a CPU decodes fastest, where passes are a few rows:

  head_blocks             the head once more, in blocks of columns
  self_attn/qkv_proj      of each layer, instead of q_proj, k_proj, v_proj
  """
  if config.tied_head:
    table = params["embed_tokens"]["embedding"]
    cut = lambda start, stop: table[start:stop].T
  else:
    kernel = params["lm_head"]["kernel"]
    cut = lambda start, stop: kernel[:, start:stop]
  blocks = layers.column_blocks(config.vocab_size)
  made = {f"block_{i}": {"kernel": cut(*b)} for i, b in enumerate(blocks)}
  names = [f"layers_{i}" for i in range(config.num_layers)]
  join = lambda p: p | {"self_attn": layers.join_qkv(p["self_attn"])}
  return params | {n: join(params[n]) for n in names} | {"head_blocks": made}


class Target(nn.Module):
  """taps: layer numbers whose inputs are returned; num_layers = the output
  of the last layer, before the final norm.
  on_cpu: the parameters are those of `cpu_layout`."""

  config: TargetConfig
  taps: tuple[int, ...] = ()
  on_cpu: bool = False

  def setup(self):
    c = self.config
    self.embed_tokens = layers.Embed(c.vocab_size, c.hidden_size, c.dtype)
    self.layers = [DecoderLayer(c, self.on_cpu) for _ in range(c.num_layers)]
    self.norm = layers.RMSNorm(c.norm_eps)
    if not c.tied_head:
      self.lm_head = layers.Head(c.vocab_size, c.dtype)
    if self.on_cpu:
      self.head_blocks = layers.BlockedHead(c.vocab_size, c.dtype)

  def __call__(
    self,
    tokens: Array,
    positions: Array,
    attend: masks.Attend,
    cache: Cache | None,
  ) -> tuple[TargetOut, Rows]:
    """One pass, whatever the rows are: a prompt, one token, or a tree.

    Args:
      tokens: int32[B, T].
      positions: int32[B, T].
      attend: who sees whom.
      cache: committed rows, read only; None where attend.length is None.

    Returns:
      the features, and the key/value rows of this call for `kv_cache.commit`.
    """
    c = self.config
    if c.sliding_window is not None:
      attend = attend.replace(window=c.sliding_window)
    turn = layers.rotary(positions, c)
    x = self.embed_tokens(tokens)
    taps, rows = [], []
    for i, layer in enumerate(self.layers):
      if i in self.taps:
        taps.append(x)
      prefix = None if cache is None else cache[i]
      x, made = layer(x, positions, turn, attend, prefix)
      rows.append(made)
    if c.num_layers in self.taps:
      taps.append(x)
    feature = self.norm(x)
    tapped = jnp.concatenate([*taps, feature[..., :0]], axis=-1)
    if not c.tied_head and self.is_initializing():
      self.lm_head(feature)
    return TargetOut(feature, tapped), tuple(rows)

  def logits(self, feature: Array) -> Array:
    """float32[..., V]. Its own call, so that nobody pays for unread rows."""
    if self.on_cpu and math.prod(feature.shape[:-1]) in FEW_ROWS:
      return self.head_blocks(feature)
    if self.config.tied_head:
      return self.embed_tokens.scores(feature)
    return self.lm_head(feature)
