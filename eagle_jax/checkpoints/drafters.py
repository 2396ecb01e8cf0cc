"""Drafter folders: the official EAGLE layouts as safetensors, in and out.

  config.json        the official fields, and an `eagle_jax` entry of ours
  model.safetensors  the official names; `d2t` as offsets where W < V

Frozen rows that the target has (embedding, and the head of a drafter whose
head is the target's own) are not stored again: `d2t` says which rows.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import tensors
from eagle_jax.checkpoints.hf_target import read_config, rope_scaling
from eagle_jax.checkpoints.tensors import Rule
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter

_EAGLE = r"layers\.0\."
_EAGLE3 = r"midlayer\."
_BLOCK = [
  (r"self_attn\.([qkvo])_proj\.weight", r"self_attn/\1_proj/kernel", True),
  (r"self_attn\.([qkv])_proj\.bias", r"self_attn/\1_proj/bias", False),
  (r"self_attn\.([qk])_norm\.weight", r"self_attn/\1_norm/scale", False),
  (r"mlp\.(gate|up|down)_proj\.weight", r"mlp/\1_proj/kernel", True),
  (
    r"post_attention_layernorm\.weight",
    "post_attention_layernorm/scale",
    False,
  ),
]
_SHARED = [
  Rule(r"embed_tokens\.weight", "embed_tokens/embedding"),
  Rule(r"fc\.weight", "fc/kernel", transpose=True),
  Rule(r"fc\.bias", "fc/bias"),
  Rule(r"lm_head\.weight", "lm_head/kernel", transpose=True),  # if its own
]
RULES = {
  "eagle": _SHARED + [Rule(_EAGLE + p, to, t) for p, to, t in _BLOCK],
  "eagle3": _SHARED
  + [Rule(_EAGLE3 + p, to, t) for p, to, t in _BLOCK]
  + [
    Rule(_EAGLE3 + r"input_layernorm\.weight", "input_layernorm/scale"),
    Rule(_EAGLE3 + r"hidden_norm\.weight", "hidden_norm/scale"),
    Rule(r"norm\.weight", "norm/scale"),
  ],
}


# The architecture of drafters with other inputs than EAGLE's: a name that no
# other program knows, so that none reads such weights as an EAGLE drafter.
ABLATION = "EagleJaxAblation"


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
  """A drafter ready to run.

  params: complete, the target's shared tables included by reference.
  vocabulary: int32[W], draft id -> target id (ascending).
  notes: what the file says of its training (template, target, data).
  """

  config: DrafterConfig
  params: dict
  vocabulary: np.ndarray
  notes: dict


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
  """Path -> shape of every parameter, without allocating any."""
  width = config.hidden_size * max(len(config.taps), 1)
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(
    lambda t, f: Drafter(config).init(
      jax.random.key(0), t, f, t, method="everything"
    ),
    ids,
    shape(1, 1, width),
  )["params"]
  return {p: a.shape for p, a in tensors.flatten(tree).items()}


def official_taps(num_layers: int) -> tuple[int, int, int]:
  """The layers whose inputs an EAGLE-3 drafter reads.

  Raises:
    InputError: a target so shallow that they coincide.
  """
  if num_layers < 7:
    raise InputError(
      f"a target of {num_layers} layers is too shallow for the three taps of"
      " an EAGLE-3 drafter: give taps, ascending, or use kind 'eagle'"
    )
  return (2, num_layers // 2, num_layers - 3)


def _config(
  raw: dict,
  names: dict[str, tuple[int, ...]],
  target: TargetConfig,
  where: str,
) -> DrafterConfig:
  """A drafter's config.json (and what its file holds) -> ours."""
  ours = raw.get("eagle_jax", {})
  kind = "eagle3" if "midlayer.hidden_norm.weight" in names else "eagle"
  for field, value in {
    "hidden_size": target.hidden_size,
    "vocab_size": target.vocab_size,
  }.items():
    if raw.get(field) != value:
      raise InputError(
        f"{where}: {field} {raw.get(field)} does not fit the target's {value}:"
        " this drafter was trained for another model"
      )
  heads = raw["num_attention_heads"]
  taps = tuple(ours.get("taps", ()))
  if kind == "eagle3" and not taps:
    taps = official_taps(target.num_layers)
  if max(taps, default=0) > target.num_layers:
    raise InputError(
      f"{where}: taps {taps} reach past the target's {target.num_layers} layers"
    )
  return DrafterConfig(
    kind=kind,
    vocab_size=target.vocab_size,
    draft_vocab_size=raw.get("draft_vocab_size") or target.vocab_size,
    taps=taps if kind == "eagle3" else (),
    fc_bias="fc.bias" in names,
    draft_noise=float(ours.get("draft_noise", 0.0)),
    inputs=ours.get("inputs", "feature+token"),
    hidden_size=raw["hidden_size"],
    mlp_size=raw["intermediate_size"],
    num_heads=heads,
    num_kv_heads=raw.get("num_key_value_heads") or heads,
    head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
    norm_eps=float(raw["rms_norm_eps"]),
    rope_theta=float(
      raw.get("rope_theta")
      or (raw.get("rope_parameters") or {}).get("rope_theta")
      or 10000.0
    ),
    max_positions=raw["max_position_embeddings"],
    rope_scaling=rope_scaling(raw.get("rope_scaling")),
    qkv_bias=any(n.endswith("q_proj.bias") for n in names),
    dtype=target.dtype,
  )


def _vocabulary(
  offsets: np.ndarray | None, config: DrafterConfig, where: str
) -> np.ndarray:
  """int32[W] from `d2t` (offsets: target id = draft id + offset)."""
  W, V = config.draft_vocab_size, config.vocab_size
  if offsets is None:
    if W != V:
      raise InputError(
        f"{where}: d2t is missing, but draft_vocab_size {W} is below the"
        f" vocabulary {V}: the draft ids cannot be told"
      )
    return np.arange(V, dtype=np.int32)
  if offsets.shape != (W,):
    raise InputError(
      f"{where}: d2t has shape {offsets.shape}, draft_vocab_size is {W}"
    )
  ids = np.arange(W) + offsets.astype(np.int64)
  if ids.min() < 0 or ids.max() >= V:
    raise InputError(
      f"{where}: d2t gives target ids {ids.min()}..{ids.max()}, outside"
      f" 0..{V - 1}: it must hold offsets (target id - draft id)"
    )
  if (np.diff(ids) <= 0).any():
    raise InputError(
      f"{where}: d2t does not give ascending target ids: it must hold offsets"
      " (target id - draft id)"
    )
  return ids.astype(np.int32)


def load(
  folder: pathlib.Path,
  target: TargetConfig,
  target_params: dict,
  put=jnp.asarray,
) -> LoadedDrafter:
  """Read a drafter folder strictly; every mismatch is in one message."""
  raw = read_config(folder)
  files = tensors.files_of(folder)
  names, special = {}, {}
  for name, array in tensors.read_all(files):
    names[name] = tuple(array.shape)
    if name in ("d2t", "t2d"):
      special[name] = array
  where = str(folder)
  try:
    config = _config(raw, names, target, where)
  except KeyError as e:
    raise InputError(
      f"{folder / 'config.json'}: field {e} is missing"
    ) from None
  except InputError:
    raise
  except (ValueError, TypeError) as e:
    raise InputError(f"{folder / 'config.json'}: {e}") from None
  vocabulary = _vocabulary(special.get("d2t"), config, where)
  if "t2d" in special:
    marked = np.flatnonzero(special["t2d"])
    if not np.array_equal(marked, vocabulary) and marked.size:
      raise InputError(
        f"{where}: t2d marks {marked.size} ids that are not the ones d2t gives"
      )
  stored = {
    path: shape
    for path, shape in parameter_shapes(config).items()
    if not (
      (path == "embed_tokens/embedding" and "embed_tokens.weight" not in names)
      or (path == "lm_head/kernel" and "lm_head.weight" not in names)
    )
  }
  dtype = jnp.dtype(target.dtype)
  params = tensors.load(
    tensors.read_all(files),
    RULES[config.kind],
    stored,
    "d2t|t2d",
    lambda _, a: put(np.ascontiguousarray(a.astype(dtype))),
    where,
  )
  params.setdefault("embed_tokens", target_params["embed_tokens"])
  if "lm_head" not in params:
    params["lm_head"] = target_rows(target, target_params, vocabulary)
  return LoadedDrafter(config, params, vocabulary, raw.get("eagle_jax", {}))


def target_rows(
  target: TargetConfig, target_params: dict, vocabulary: np.ndarray
) -> dict:
  """The target's head [D, W] cut to the draft vocabulary; by reference where
  it is whole and lies like that already."""
  if target.tied_head:
    table = target_params["embed_tokens"]["embedding"]
    return {"kernel": table[vocabulary].T}
  if len(vocabulary) == target.vocab_size:
    return target_params["lm_head"]
  return {"kernel": target_params["lm_head"]["kernel"][:, vocabulary]}


def save(
  folder: pathlib.Path,
  config: DrafterConfig,
  params: dict,
  vocabulary: np.ndarray,
  own_head: bool,
  notes: dict,
  dtype: str,
) -> None:
  """Write a drafter folder in the official layout.

  Args:
    own_head: store lm_head (a trained one); else the target's rows are used.
    notes: training facts, kept in config.json.
    dtype: of the stored weights.
  """
  for field in ("rope_scaling", "sliding_window", "qk_norm"):
    if getattr(config, field):
      raise ValueError(f"the official layout has no place for {field}")
  from safetensors.numpy import save_file

  prefix = "midlayer." if config.kind == "eagle3" else "layers.0."
  inside = (
    "self_attn",
    "mlp",
    "post_attention_layernorm",
    "input_layernorm",
    "hidden_norm",
  )
  weights = {}
  for path, leaf in tensors.flatten(params).items():
    top, *_, kind = path.split("/")
    if top == "embed_tokens" or (top == "lm_head" and not own_head):
      continue
    name = ".".join(path.split("/")[:-1])
    name += ".bias" if kind == "bias" else ".weight"
    array = np.asarray(leaf).astype(jnp.dtype(dtype))
    array = array.T if kind == "kernel" else array
    weights[(prefix if top in inside else "") + name] = np.ascontiguousarray(
      array
    )
  if config.draft_vocab_size != config.vocab_size:
    ids = np.asarray(vocabulary, np.int64)
    marked = np.zeros(config.vocab_size, bool)
    marked[ids] = True
    weights |= {"d2t": ids - np.arange(len(ids)), "t2d": marked}
  name = "LlamaForCausalLM" + ("Eagle3" if config.kind == "eagle3" else "")
  if config.inputs != "feature+token":
    name = ABLATION
  raw = {
    "architectures": [name],
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
    "max_position_embeddings": config.max_positions,
    "bias": config.fc_bias,
    "qkv_bias": config.qkv_bias,
    "tie_word_embeddings": False,
    "torch_dtype": dtype,
    "eagle_jax": notes
    | {
      "taps": list(config.taps),
      "draft_noise": config.draft_noise,
      "inputs": config.inputs,
    },
  }
  folder.mkdir(parents=True, exist_ok=True)
  save_file(weights, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
