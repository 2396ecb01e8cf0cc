"""config.json of a drafter, in every published layout -> `DrafterConfig`.

  layout        fields                    taps
  original      flat                      none: the official three
  vLLM          flat, its own switches    eagle_aux_hidden_state_layer_ids
  SGLang,       flat, eagle_config        the same inside eagle_config, but
  SpecForge                               counting outputs: one less
  speculators   transformer_layer_config  eagle_aux_hidden_state_layer_ids
                for the layer's fields
  ours          the original's            eagle_jax: taps, switches, notes

Taps count inputs of layers (0-based). A missing rope_theta means 10000
whatever the target's is. Biases, q/k norms and tables are told by their
presence in the weights: published configs say them wrongly or not at all.
"""

import dataclasses
import re

from eagle_jax.checkpoints.hf_target import rope_scaling
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.errors import InputError

LAYER = r"(?:model\.)?(?:midlayer|layers\.0)\."


SHALLOW = 7  # fewer layers than this make official taps coincide


def official_taps(num_layers: int) -> tuple[int, int, int]:
  """The layers whose inputs an EAGLE-3 drafter reads.

  Raises:
    InputError: a target so shallow that they coincide.
  """
  if num_layers < SHALLOW:
    raise InputError(
      f"a target of {num_layers} layers is too shallow for the three taps of"
      " an EAGLE-3 drafter: give taps, ascending, or use kind 'eagle'"
    )
  return (2, num_layers // 2, num_layers - 3)


def are_official(taps: tuple[int, ...], num_layers: int) -> bool:
  """Are they `official_taps`? Of a target too shallow for them none are."""
  return num_layers >= SHALLOW and taps == official_taps(num_layers)


def for_target(
  target: TargetConfig,
  kind: str,
  draft_vocab_size: int,
  taps: tuple[int, ...] = (),
  mlp_size: int = 0,
  **fields,
) -> DrafterConfig:
  """A drafter of the target's layer shape.

  A drafter has one mlp for all tokens; beside a target of experts it is as
  wide as those that a token goes through. The official layouts have biases,
  but no q/k norm and no rotary scaling.

  Args:
    taps: of kind "eagle3"; none = the official ones.
    mlp_size: 0 = the target's.
    fields: of DrafterConfig, over those of the target.

  Raises:
    ValueError: what fits neither each other nor the target.
  """
  if max(taps, default=0) > target.num_layers:
    raise InputError(
      f"taps {taps} reach past the target's {target.num_layers} layers"
    )
  if kind != "eagle3":
    taps = ()
  elif not taps:
    taps = official_taps(target.num_layers)
  same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_size")
  same += ("norm_eps", "rope_theta", "max_positions", "qkv_bias", "dtype")
  wide = target.mlp_size * max(target.experts_per_token, 1)
  return DrafterConfig(
    **{n: getattr(target, n) for n in same}
    | {
      "kind": kind,
      "draft_vocab_size": draft_vocab_size,
      "taps": taps,
      "mlp_size": mlp_size or wide,
    }
    | fields
  )


def _speculators(raw: dict, where: str) -> dict:
  """The fields of a speculators config, flat."""
  kind = raw["speculators_model_type"]
  if kind != "eagle3":
    raise InputError(
      f"{where}: speculators_model_type {kind!r} is not supported: only"
      " 'eagle3'"
    )
  if "norm_before_residual" not in raw:
    raise InputError(
      f"{where}: norm_before_residual is missing: speculators reads that as"
      " false, vLLM as true; write down which one the drafter was trained with"
    )
  import transformers  # it leaves out fields that have their default

  layer = dict(raw["transformer_layer_config"])
  made = transformers.AutoConfig.for_model(
    layer.pop("model_type", "llama"), **layer
  )
  own = {k: v for k, v in raw.items() if k != "transformer_layer_config"}
  return made.to_dict() | own


def _taps(raw: dict, ours: dict, target: TargetConfig) -> tuple[int, ...]:
  if ours.get("taps"):
    return tuple(ours["taps"])
  if raw.get("eagle_aux_hidden_state_layer_ids"):
    return tuple(raw["eagle_aux_hidden_state_layer_ids"])
  outputs = (raw.get("eagle_config") or {}).get(
    "eagle_aux_hidden_state_layer_ids"
  )
  if outputs:
    return tuple(i + 1 for i in outputs)
  return official_taps(target.num_layers)


def _norm_output(raw: dict, ours: dict, given: bool | None, where: str) -> bool:
  """Are rows fed back after the norm? The flag of that name is no answer."""
  if given is not None:
    return given
  if "norm_output" in ours:
    return bool(ours["norm_output"])
  if not raw.get("norm_output"):
    return False
  vllm = "Eagle3LlamaForCausalLM" in (raw.get("architectures") or [])
  if vllm or "speculators_model_type" in raw:
    return True
  raise InputError(
    f"{where}: norm_output true has two meanings in this layout: rows are fed"
    " back after the norm (EAGLE-3.1), or the norm precedes the head and rows"
    " are fed back before it (SpecForge up to September 2026). Say which:"
    " python -m eagle_jax.checkpoints.convert --norm_output=fed_back, or"
    " =head_only"
  )


def read(
  raw: dict,
  shapes: dict[str, tuple[int, ...]],
  target: TargetConfig,
  norm_output: bool | None,
  where: str,
) -> DrafterConfig:
  """A drafter's config.json (and what its weights are called) -> ours.

  Args:
    shapes: name -> shape of the weights in the file.
    norm_output: what that flag means, where the layout leaves it open.

  Raises:
    InputError: a drafter of another target, or one computed otherwise.
    KeyError, ValueError, TypeError: a missing or impossible field.
  """
  ours = raw.get("eagle_jax", {})
  if "speculators_model_type" in raw:
    raw = _speculators(raw, where)
  has = lambda pattern: any(re.fullmatch(pattern, n) for n in shapes)
  eagle3 = has(LAYER + r"hidden_norm\.weight") or has(r"midlayer\..*")
  _check_layer(raw, where)
  width = raw.get("target_hidden_size") or raw["hidden_size"]
  for field, found, wanted in (
    ("hidden_size", width, target.hidden_size),
    ("vocab_size", raw["vocab_size"], target.vocab_size),
  ):
    if found != wanted:
      raise InputError(
        f"{where}: {field} {found} does not fit the target's {wanted}: this"
        " drafter was trained for another model"
      )
  taps = _taps(raw, ours, target) if eagle3 else ()
  if max(taps, default=0) > target.num_layers:
    raise InputError(
      f"{where}: taps {taps} reach past the target's {target.num_layers} layers"
    )
  # a full vocabulary needs no field, a cut one may be told by its table alone
  W = raw.get("draft_vocab_size") or shapes.get("d2t", (raw["vocab_size"],))[0]
  switches = {}
  if eagle3:
    says = lambda name, there: bool(ours.get(name, raw.get(name, there)))
    switches = {
      "fc_norm": says("fc_norm", has(r"(?:model\.)?fc_norms?\.0\.weight")),
      "norm_before_fc": says(
        "norm_before_fc", has(r"(?:model\.)?input_norm\.weight")
      ),
      "norm_before_residual": says("norm_before_residual", False),
      "norm_output": _norm_output(raw, ours, norm_output, where),
    }
  heads = raw["num_attention_heads"]
  rope = raw.get("rope_parameters") or {}
  scaling = rope_scaling(raw.get("rope_scaling") or rope)
  if scaling and not scaling.original_max_positions:
    scaling = dataclasses.replace(
      scaling, original_max_positions=raw["max_position_embeddings"]
    )
  return DrafterConfig(
    kind="eagle3" if eagle3 else "eagle",
    vocab_size=target.vocab_size,
    draft_vocab_size=W,
    taps=taps,
    fc_bias=has(r"(?:model\.)?fc\.bias"),
    target_hidden_size=width if width != raw["hidden_size"] else None,
    own_embedding=has(r"(?:model\.)?embed_tokens\.weight"),
    draft_noise=float(ours.get("draft_noise", 0.0)),
    inputs=ours.get("inputs", "feature+token"),
    hidden_size=raw["hidden_size"],
    mlp_size=raw["intermediate_size"],
    num_heads=heads,
    num_kv_heads=raw.get("num_key_value_heads") or heads,
    head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
    norm_eps=float(raw["rms_norm_eps"]),
    rope_theta=float(
      raw.get("rope_theta") or rope.get("rope_theta") or 10000.0
    ),
    max_positions=raw["max_position_embeddings"],
    rope_scaling=scaling,
    qkv_bias=has(LAYER + r"self_attn\.[qkv]_proj\.bias"),
    qk_norm=has(LAYER + r"self_attn\.[qk]_norm\.weight"),
    dtype=target.dtype,
    **switches,
  )


def _check_layer(raw: dict, where: str) -> None:
  """Refuses drafters that `models.drafter` does not compute."""
  layers = raw.get("num_hidden_layers", 1)
  if layers != 1:
    raise InputError(
      f"{where}: num_hidden_layers {layers}: only drafters of one layer are"
      " supported"
    )
  if raw.get("hidden_act", "silu") != "silu":
    raise InputError(
      f"{where}: hidden_act {raw['hidden_act']!r} is not supported: only silu"
    )
  window = raw.get("sliding_window")
  used = raw.get("use_sliding_window", True)
  if window and used and window < raw["max_position_embeddings"]:
    raise InputError(
      f"{where}: sliding_window {window} is not supported in a drafter's file"
    )
  if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
    raise InputError(
      f"{where}: eagle_config.use_aux_hidden_state false is not supported: an"
      " EAGLE-3 drafter reads tapped layers"
    )


def _rope(config: DrafterConfig) -> dict | None:
  """`rope_scaling` as Hugging Face configs have it."""
  s = config.rope_scaling
  if s is None:
    return None
  fields = {"rope_type": s.kind, "factor": s.factor}
  if s.kind != "linear":
    fields["original_max_position_embeddings"] = s.original_max_positions
  if s.kind == "llama3":
    fields["low_freq_factor"] = s.low_freq_factor
    fields["high_freq_factor"] = s.high_freq_factor
  if s.kind == "yarn":
    fields["beta_fast"], fields["beta_slow"] = s.beta_fast, s.beta_slow
    fields["attention_factor"] = s.attention_factor
  return fields


def flat(config: DrafterConfig, dtype: str) -> dict:
  """The fields that the original's config.json has."""
  fields = {
    "architectures": [
      "LlamaForCausalLMEagle3"
      if config.kind == "eagle3"
      else "LlamaForCausalLM"
    ],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "vocab_size": config.vocab_size,
    "draft_vocab_size": config.draft_vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.mlp_size,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_size,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": _rope(config),
    "max_position_embeddings": config.max_positions,
    "bias": config.fc_bias,
    "qkv_bias": config.qkv_bias,
    "tie_word_embeddings": False,
    "torch_dtype": dtype,
  }
  if config.target_hidden_size:
    fields["target_hidden_size"] = config.target_hidden_size
  return fields
