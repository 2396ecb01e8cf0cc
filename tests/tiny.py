"""Tiny random models for tests: real code, no meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import drafter_configs, drafters
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.loading import LoadedTarget
from eagle_jax.models import masks
from eagle_jax.models.target import Target
from eagle_jax.training import start

V, D = 64, 32

# Every switch of an "eagle3" drafter, in pairs that published files have.
VARIANTS = {
  "plain": {},
  "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
  "speculators": {"norm_before_fc": True, "norm_before_residual": True},
  "own width": {
    "hidden_size": 24,
    "target_hidden_size": D,
    "own_embedding": True,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 10,
    "qkv_bias": True,
    "fc_bias": True,
    "draft_vocab_size": V,
  },
}


def target_config(**changes) -> TargetConfig:
  fields = {
    "family": "llama",
    "vocab_size": V,
    "num_layers": 8,
    "tied_head": True,
    "hidden_size": D,
    "mlp_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_positions": 256,
  }
  return TargetConfig(**fields | changes)


def target(
  seed: int = 0, ends: tuple[int, ...] = (), **changes
) -> LoadedTarget:
  """A random target whose logits are spread enough to be interesting."""
  config = target_config(**changes)
  ids = jnp.zeros((1, 1), jnp.int32)
  params = Target(config).init(
    jax.random.key(seed), ids, ids, masks.Attend(own=masks.Itself()), None
  )["params"]
  params = jax.tree.map(
    lambda a: a * 6.0 if a.ndim > 1 and a.shape[0] != V else a, params
  )
  return LoadedTarget("tiny", config, params, None, ends)


def drafter(
  target: LoadedTarget,
  kind: str = "eagle3",
  W: int = 48,
  seed: int = 1,
  **changes,
) -> LoadedDrafter:
  """A drafter that starts from the target's last layer; from chance where
  `changes` of its config give it another shape."""
  t = target.config
  config = DrafterConfig(
    kind=kind,
    vocab_size=t.vocab_size,
    draft_vocab_size=W,
    taps=changes.pop("taps", None)
    or (
      drafter_configs.official_taps(t.num_layers) if kind == "eagle3" else ()
    ),
    hidden_size=t.hidden_size,
    mlp_size=t.mlp_size,
    num_heads=t.num_heads,
    num_kv_heads=t.num_kv_heads,
    head_size=t.head_size,
    norm_eps=t.norm_eps,
    rope_theta=t.rope_theta,
    max_positions=t.max_positions,
    dtype=t.dtype,
  )
  config = dataclasses.replace(config, **changes)
  W = config.draft_vocab_size
  rng = np.random.default_rng(seed)
  vocabulary = np.sort(rng.permutation(t.vocab_size)[:W]).astype(np.int32)
  params = start.random(config, seed)
  if config.hidden_size == t.hidden_size:  # another width has its own tables
    if not config.own_embedding:
      params = params | {"embed_tokens": target.params["embed_tokens"]}
    head = drafters.target_rows(t, target.params, vocabulary)
    params = params | {"lm_head": head}
  if config.hidden_size == t.hidden_size and not t.num_experts:
    params = start.from_last_layer(params, config, t, target.params, 1.0)
  if changes:  # norms start at 1 and biases at 0: a test would not see them
    params = jax.tree.map(
      lambda a: (
        a + rng.normal(0, 0.3, a.shape).astype(a.dtype) if a.ndim == 1 else a
      ),
      params,
    )
  return LoadedDrafter(config, params, vocabulary, {})
