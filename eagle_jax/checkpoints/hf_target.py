"""Targets from Hugging Face folders: config.json + safetensors."""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import tensors
from eagle_jax.checkpoints.tensors import Rule
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.models import masks
from eagle_jax.models.target import Target

_LAYER = r"(?:model\.)?layers\.(\d+)\."
RULES = [
  Rule(r"(?:model\.)?embed_tokens\.weight", "embed_tokens/embedding"),
  Rule(
    _LAYER + r"self_attn\.([qkvo])_proj\.weight",
    r"layers_\1/self_attn/\2_proj/kernel",
    transpose=True,
  ),
  Rule(
    _LAYER + r"self_attn\.([qkv])_proj\.bias",
    r"layers_\1/self_attn/\2_proj/bias",
  ),
  Rule(
    _LAYER + r"self_attn\.([qk])_norm\.weight",
    r"layers_\1/self_attn/\2_norm/scale",
  ),
  Rule(
    _LAYER + r"mlp\.(gate|up|down)_proj\.weight",
    r"layers_\1/mlp/\2_proj/kernel",
    transpose=True,
  ),
  Rule(
    _LAYER + r"(input|post_attention)_layernorm\.weight",
    r"layers_\1/\2_layernorm/scale",
  ),
  Rule(
    _LAYER + r"(?:mlp|block_sparse_moe)\.gate\.weight",
    r"layers_\1/mlp/router/kernel",
    transpose=True,
  ),
  Rule(
    _LAYER + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight",
    r"layers_\1/mlp/experts/\3_proj/kernel",
    transpose=True,
    number=2,
  ),
  *(
    Rule(
      _LAYER + rf"block_sparse_moe\.experts\.(\d+)\.{theirs}\.weight",
      rf"layers_\1/mlp/experts/{ours}_proj/kernel",
      transpose=True,
      number=2,
    )
    for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
  ),
  Rule(r"(?:model\.)?norm\.weight", "norm/scale"),
  Rule(r"lm_head\.weight", "lm_head/kernel", transpose=True),
]
# Buffers of old transformers versions, recomputed from the config.
_BUFFERS = r".*rotary_emb\.inv_freq"

FAMILIES = {
  "llama": {},
  "mistral": {},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  "mixtral": {"norm_expert_weights": True},
  "qwen3_moe": {"qk_norm": True},
}


def rope_scaling(raw: dict | None) -> RopeScaling | None:
  """The `rope_scaling` (or new `rope_parameters`) entry of a config.json."""
  if not raw:
    return None
  kind = raw.get("rope_type", raw.get("type", "default"))
  if kind == "default":
    return None
  if kind == "linear":
    return RopeScaling("linear", float(raw["factor"]))
  original = raw.get("original_max_position_embeddings")
  if kind == "llama3":
    return RopeScaling(
      "llama3",
      float(raw["factor"]),
      original_max_positions=original,
      low_freq_factor=float(raw["low_freq_factor"]),
      high_freq_factor=float(raw["high_freq_factor"]),
    )
  if kind == "yarn":
    odd = [n for n in ("mscale", "mscale_all_dim") if raw.get(n)]
    if odd or raw.get("truncate") is False:
      raise ValueError(
        f"yarn scaling with {', '.join(odd) or 'truncate false'} is not"
        " supported"
      )
    factor = float(raw["factor"])
    attention = raw.get("attention_factor") or 0.1 * np.log(factor) + 1.0
    return RopeScaling(
      "yarn",
      factor,
      original_max_positions=original,
      beta_fast=float(raw.get("beta_fast") or 32),
      beta_slow=float(raw.get("beta_slow") or 1),
      attention_factor=float(attention),
    )
  raise ValueError(
    f"rope scaling {kind!r} is not supported: linear, llama3 and yarn are"
  )


def target_config(
  raw: dict, dtype: str, where: str = "config.json"
) -> TargetConfig:
  """A Hugging Face config -> ours; refuses what we would compute wrongly."""
  family = raw.get("model_type")
  if family not in FAMILIES:
    raise InputError(
      f"{where}: model_type {family!r} is not supported: use one of"
      f" {', '.join(FAMILIES)}"
    )
  if raw.get("hidden_act", "silu") != "silu":
    raise InputError(
      f"{where}: hidden_act {raw['hidden_act']!r} is not supported: only silu"
    )
  if raw.get("mlp_bias"):
    raise InputError(f"{where}: mlp_bias true is not supported")
  try:
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = raw.get("rope_theta", rope.get("rope_theta", 10000.0))
    scaling = rope_scaling(rope)
    if scaling and not scaling.original_max_positions:
      scaling = dataclasses.replace(
        scaling, original_max_positions=raw["max_position_embeddings"]
      )
    switches = {
      "qkv_bias": bool(raw.get("attention_bias", False)),
      "mlp_size": raw["intermediate_size"],
    }
    switches |= _experts(raw, family, where) | FAMILIES[family]
    return TargetConfig(
      family=family,
      vocab_size=raw["vocab_size"],
      num_layers=raw["num_hidden_layers"],
      tied_head=bool(raw.get("tie_word_embeddings", False)),
      hidden_size=raw["hidden_size"],
      num_heads=heads,
      num_kv_heads=raw.get("num_key_value_heads") or heads,
      head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
      norm_eps=float(raw["rms_norm_eps"]),
      rope_theta=float(theta),
      max_positions=raw["max_position_embeddings"],
      rope_scaling=scaling,
      sliding_window=_sliding_window(raw, family, where),
      dtype=dtype,
      **switches,
    )
  except InputError:
    raise
  except KeyError as e:
    raise InputError(f"{where}: field {e} is missing") from None
  except (ValueError, TypeError, AttributeError) as e:
    raise InputError(f"{where}: {e}") from None


def _experts(raw: dict, family: str, where: str) -> dict:
  """The fields of a Mixture-of-Experts target; none for the others."""
  if family not in ("mixtral", "qwen3_moe"):
    return {}
  if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
    raise InputError(
      f"{where}: some layers have experts and some do not (mlp_only_layers or"
      " decoder_sparse_step): such a mix is not supported"
    )
  E = raw.get("num_local_experts", raw.get("num_experts"))
  if not E:
    raise InputError(f"{where}: field 'num_local_experts' is missing")
  fields = {"num_experts": E, "experts_per_token": raw["num_experts_per_tok"]}
  if family == "qwen3_moe":
    fields["mlp_size"] = raw["moe_intermediate_size"]
    fields["norm_expert_weights"] = bool(raw.get("norm_topk_prob", False))
  return fields


def _sliding_window(raw: dict, family: str, where: str) -> int | None:
  """The window of all layers; refuses a mix of windowed and full ones."""
  window = raw.get("sliding_window")
  always = family in ("mistral", "mixtral")
  if not window or not raw.get("use_sliding_window", always):
    return None
  layers = raw["num_hidden_layers"]
  first = 0 if always else raw.get("max_window_layers", layers)
  kinds = raw.get("layer_types") or [
    "full_attention" if i < first else "sliding_attention"
    for i in range(layers)
  ]
  if len(set(kinds)) > 1:
    raise InputError(
      f"{where}: some layers have a sliding window and some do not (layer_types"
      " or max_window_layers): such a mix is not supported"
    )
  return window if kinds[0] == "sliding_attention" else None


def parameter_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
  """Path -> shape of every parameter, without allocating any."""
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  attend = masks.Attend(own=masks.Itself())
  tree = jax.eval_shape(
    lambda t: Target(config).init(jax.random.key(0), t, t, attend, None), ids
  )["params"]
  return {p: a.shape for p, a in tensors.flatten(tree).items()}


def read_config(folder: pathlib.Path) -> dict:
  return read_json(folder / "config.json")


def read_json(file: pathlib.Path) -> dict:
  """The object in a JSON file of a model folder."""
  try:
    raw = json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise InputError(
      f"{file} does not exist: give the folder of a Hugging Face model"
    ) from None
  except ValueError as e:  # not JSON, or not text
    raise InputError(f"{file}: not valid JSON ({e})") from None
  if not isinstance(raw, dict):
    raise InputError(f"{file}: a JSON object is wanted")
  return raw


def load(
  folder: pathlib.Path,
  dtype: str,
  shard: Callable[[TargetConfig, dict], dict] | None = None,
) -> tuple[TargetConfig, dict]:
  """Config and parameters of a target, read tensor by tensor.

  Args:
    folder: a Hugging Face model folder.
    dtype: "float32" or "bfloat16", of the weights and the arithmetic.
    shard: (config, shapes of the parameters) -> their shardings; each device
      then gets its part straight from the file. None = one device.
  """
  config = target_config(
    read_config(folder), dtype, str(folder / "config.json")
  )
  ignored = _BUFFERS + (r"|lm_head\.weight" if config.tied_head else "")
  shapes = parameter_shapes(config)
  places = dict.fromkeys(shapes)
  if shard:
    tree = {p: jax.ShapeDtypeStruct(s, dtype) for p, s in shapes.items()}
    places = tensors.flatten(shard(config, tensors.nest(tree)))
  params = tensors.load(
    tensors.stored(tensors.files_of(folder)),
    RULES,
    shapes,
    ignored,
    lambda path, tensor: tensors.place(tensor, dtype, places[path]),
    str(folder),
    {},
  )
  return config, params
