"""The drafter: one decoder layer that regresses the target's next state.

Row t reads the pair (feature of token t, token t+1) and predicts the feature
of token t+1, whose head scores token t+2. The token removes the randomness of
the draw: the next feature is a function of the pair and the past, so the
drafter regresses a value instead of guessing a sample (EAGLE, arXiv
2401.15077, section 3).

  kind "eagle"                         kind "eagle3" (arXiv 2503.01840)
  x = fc([emb, f])                     g = fc([tap0, tap1, tap2])
  x += attn(x)                         x = g + attn([norm(emb), norm(g)])
  x += mlp(norm(x))                    x += mlp(norm(x))
  logits = target_head(x)              logits = head(norm(x))
  fed back: x                          fed back: x, before the norm

What row t reads is a switch, so that the argument can be measured (f_t: the
feature of token x_t; all four regress f_{t+1}; parameters are the same):

  "feature+token"       f_t  x_{t+1}    EAGLE
  "feature+unshifted"   f_t  x_t        the draw that f_{t+1} needs is missing
  "feature"             f_t  f_t        no token at all
  "token"         x_{t+1}  x_{t+1}      an independent draft model: it never
                                        sees the target's state

Variants of "eagle3", each a switch of its config:

  fc_norm               g = fc([norm0(tap0), norm1(tap1), norm2(tap2)])
  norm_before_fc        g = fc(norm([tap0, tap1, tap2]))
  norm_before_residual  x = norm(g) + attn([norm(emb), norm(g)])
  norm_output           fed back: norm(x), which the head reads too
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from eagle_jax.config import DrafterConfig
from eagle_jax.models import layers, masks
from eagle_jax.models.kv_cache import KV, Slots


def cpu_layout(params: dict) -> dict:
  """`params` as a CPU decodes fastest: `layers.join_qkv`."""
  return params | {"self_attn": layers.join_qkv(params["self_attn"])}


class Drafter(nn.Module):
  """Parameters `embed_tokens` are the target's unless config.own_embedding; so
  is `lm_head`, cut to the draft vocabulary, for kind "eagle".

  on_cpu: the parameters are those of `cpu_layout`."""

  config: DrafterConfig
  on_cpu: bool = False

  def setup(self):
    c = self.config
    self.embed_tokens = layers.Embed(c.vocab_size, c.hidden_size, c.dtype)
    self.fc = layers.Dense(c.hidden_size, c.dtype, c.fc_bias)
    self.self_attn = layers.Attention(c, self.on_cpu)
    self.mlp = layers.MLP(c)
    self.post_attention_layernorm = layers.RMSNorm(c.norm_eps)
    self.lm_head = layers.Head(c.draft_vocab_size, c.dtype)
    if c.kind == "eagle3":
      self.input_layernorm = layers.RMSNorm(c.norm_eps)
      self.hidden_norm = layers.RMSNorm(c.norm_eps)
      self.norm = layers.RMSNorm(c.norm_eps)
    if c.fc_norm:
      self.fc_norm = [layers.RMSNorm(c.norm_eps) for _ in c.taps]
    if c.norm_before_fc:
      self.input_norm = layers.RMSNorm(c.norm_eps)

  def fuse(self, features: Array) -> Array:
    """True target features -> [B, T, D], what a drafted row feeds back.

    Args:
      features: [B, T, config.read_size]: the final feature ("eagle") or the
        taps side by side.
    """
    c = self.config
    if c.kind == "eagle":
      return features
    if c.fc_norm:
      parts = jnp.split(features, len(c.taps), axis=-1)
      features = jnp.concatenate(
        [norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1
      )
    if c.norm_before_fc:
      features = self.input_norm(features)
    return self.fc(features)

  def reads(self, own: Array, following: Array) -> Array:
    """Which token goes with a feature: the one after its own, but for the
    unshifted ablation."""
    return own if self.config.inputs == "feature+unshifted" else following

  def __call__(
    self,
    tokens: Array,
    features: Array,
    positions: Array,
    attend: masks.Attend,
    prefix: Slots | None,
    earlier: KV | None,
    steps: tuple[KV, ...],
    wanted: Array | None = None,
  ) -> tuple[Array, KV]:
    """One draft pass over T pairs.

    Args:
      tokens: int32[B, T], the token after each feature's own (`reads`).
      features: [B, T, D], fused true ones or outputs of an earlier pass.
      positions: int32[B, T], of the features (one less than the tokens').
      attend: who sees whom.
      prefix, earlier, steps: keys and values of other rows (`masks`).
      wanted: int32[B, Q], the rows whose output is asked for; None = all T.

    Returns:
      out [B, Q or T, D], fed back as the next feature, and the T rows made.
    """
    c = self.config
    if c.sliding_window is not None:
      attend = attend.replace(window=c.sliding_window)
    embedded = self.embed_tokens(tokens)
    if c.inputs == "token":
      features = embedded
    elif c.inputs == "feature":
      embedded = features
    if c.kind == "eagle3":
      normed = self.hidden_norm(features)
      x = normed if c.norm_before_residual else features
      h = jnp.concatenate([self.input_layernorm(embedded), normed], -1)
    else:
      x = h = self.fc(jnp.concatenate([embedded, features], -1))
    turn = layers.rotary(positions, c)
    h, rows = self.self_attn(
      h, positions, turn, attend, prefix, earlier, steps, wanted
    )
    if wanted is not None:
      x = jnp.take_along_axis(x, wanted[..., None], axis=1)
    x += h
    x += self.mlp(self.post_attention_layernorm(x))
    return self.norm(x) if c.norm_output else x, rows

  def feature(self, out: Array) -> Array:
    """The prediction of the target's feature (the head's input)."""
    c = self.config
    return self.norm(out) if c.kind == "eagle3" and not c.norm_output else out

  def logits(self, out: Array) -> Array:
    """float32[..., W] over the draft vocabulary."""
    return self.lm_head(self.feature(out))

  def everything(self, tokens, features, positions) -> Array:
    """Touches every parameter: for `init` and shape checks."""
    attend = masks.Attend(own=masks.Causal())
    out, _ = self(
      tokens, self.fuse(features), positions, attend, None, None, ()
    )
    return self.logits(out)
