"""Drafter folders: every published layout in, the official one out.

  config.json        the official fields, and an `eagle_jax` entry of ours
  model.safetensors  the official names; `d2t` as offsets where W < V

Frozen rows that the target has (embedding, and the head of a drafter whose
head is the target's own) are not stored again: `d2t` says which rows.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import draft_ids, drafter_configs, tensors
from eagle_jax.checkpoints.drafter_configs import LAYER
from eagle_jax.checkpoints.hf_target import read_config
from eagle_jax.checkpoints.tensors import Rule
from eagle_jax.config import SWITCHES, DrafterConfig, TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter, cpu_layout

_TOP = r"(?:model\.)?"  # some projects store it, some do not
_SHARED = [
  Rule(_TOP + r"embed_tokens\.weight", "embed_tokens/embedding"),
  Rule(_TOP + r"fc\.weight", "fc/kernel", transpose=True),
  Rule(_TOP + r"fc\.bias", "fc/bias"),
  Rule(r"lm_head\.weight", "lm_head/kernel", transpose=True),  # if its own
  Rule(
    LAYER + r"self_attn\.([qkvo])_proj\.weight",
    r"self_attn/\1_proj/kernel",
    transpose=True,
  ),
  Rule(LAYER + r"self_attn\.([qkv])_proj\.bias", r"self_attn/\1_proj/bias"),
  Rule(LAYER + r"self_attn\.([qk])_norm\.weight", r"self_attn/\1_norm/scale"),
  Rule(
    LAYER + r"mlp\.(gate|up|down)_proj\.weight",
    r"mlp/\1_proj/kernel",
    transpose=True,
  ),
  Rule(
    LAYER + r"post_attention_layernorm\.weight",
    "post_attention_layernorm/scale",
  ),
]
RULES = {
  "eagle": _SHARED,
  "eagle3": [
    *_SHARED,
    Rule(LAYER + r"input_layernorm\.weight", "input_layernorm/scale"),
    Rule(LAYER + r"hidden_norm\.weight", "hidden_norm/scale"),
    Rule(_TOP + r"norm\.weight", "norm/scale"),
    Rule(_TOP + r"fc_norms?\.(\d)\.weight", r"fc_norm_\1/scale"),
    Rule(_TOP + r"input_norm\.weight", "input_norm/scale"),
  ],
}
# Not of the drafter: the vocabulary's tables, buffers of old transformers
# versions, and the target's parts that speculators trains with.
_IGNORED = r"d2t|t2d|.*rotary_emb\.inv_freq|verifier_(?:norm|lm_head)\.weight"
_REASONS = {
  LAYER + r"input_layernorm\.weight": "an EAGLE-1 layer has no input norm:"
  " with one, acceptance falls from .57 to .13; leave it out only if the"
  " drafter was trained without",
  LAYER + r"self_attn\.o_proj\.bias": "no drafter here has that bias",
}


@dataclasses.dataclass(frozen=True)
class StoredDrafter:
  """What a drafter folder holds, whatever its layout.

  weights: our path -> array in our layout, as precise as in the file; the
    target's tables only where the file has them.
  vocabulary: int32[W], draft id -> target id.
  notes: what the file says of its training (template, target, data).
  """

  config: DrafterConfig
  weights: dict[str, np.ndarray]
  vocabulary: np.ndarray
  notes: dict


# The architecture of drafters with other inputs than EAGLE's: a name that no
# other program knows, so that none reads such weights as an EAGLE drafter.
ABLATION = "EagleJaxAblation"


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
  """A drafter ready to run.

  params: complete, the target's shared tables included by reference.
  vocabulary: int32[W], draft id -> target id.
  notes: what the file says of its training (template, target, data).
  """

  config: DrafterConfig
  params: dict
  vocabulary: np.ndarray
  notes: dict

  @functools.cached_property
  def cpu_params(self) -> dict:
    """`params` in their layout for a CPU, made once."""
    return cpu_layout(self.params)


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
  """Path -> shape of every parameter, without allocating any."""
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(
    lambda t, f: Drafter(config).init(
      jax.random.key(0), t, f, t, method="everything"
    ),
    ids,
    jax.ShapeDtypeStruct((1, 1, config.read_size), jnp.float32),
  )["params"]
  return {p: a.shape for p, a in tensors.flatten(tree).items()}


def read(
  folder: pathlib.Path, target: TargetConfig, norm_output: bool | None = None
) -> StoredDrafter:
  """Read a drafter folder strictly; every mismatch is in one message.

  Args:
    norm_output: are rows fed back after the norm, where config.json leaves it
      open (`drafter_configs`); None: as it says.
  """
  raw = read_config(folder)
  file, where = str(folder / "config.json"), str(folder)
  arrays = list(tensors.read_all(tensors.files_of(folder)))
  shapes = {name: tuple(a.shape) for name, a in arrays}
  try:
    config = drafter_configs.read(raw, shapes, target, norm_output, file)
  except KeyError as e:
    raise InputError(f"{file}: field {e} is missing") from None
  except InputError:
    raise
  except (ValueError, TypeError, AttributeError) as e:
    raise InputError(f"{file}: {e}") from None
  tables = {name: a for name, a in arrays if name in ("d2t", "t2d")}
  vocabulary = draft_ids.read(
    tables.get("d2t"),
    tables.get("t2d"),
    config.draft_vocab_size,
    config.vocab_size,
    where,
  )
  fits = config.hidden_size == target.hidden_size
  absent = set()
  if not config.own_embedding:
    absent.add("embed_tokens/embedding")
  if fits and "lm_head.weight" not in shapes:
    absent.add("lm_head/kernel")
  loaded = tensors.load(
    arrays,
    RULES[config.kind],
    {p: s for p, s in parameter_shapes(config).items() if p not in absent},
    _IGNORED,
    lambda _, a: a,
    where,
    _REASONS if config.kind == "eagle" else {},
  )
  return StoredDrafter(
    config, tensors.flatten(loaded), vocabulary, raw.get("eagle_jax", {})
  )


def load(
  folder: pathlib.Path,
  target: TargetConfig,
  target_params: dict,
) -> LoadedDrafter:
  """A drafter of any layout, ready to run behind its target.

  A stored token table that is the target's own is not held twice.
  """
  stored = read(folder, target)
  config, vocabulary = stored.config, stored.vocabulary
  dtype = jnp.dtype(target.dtype)
  params = tensors.nest(
    {
      path: jnp.asarray(np.ascontiguousarray(a.astype(dtype)))
      for path, a in stored.weights.items()
    }
  )
  if config.own_embedding:
    own = params["embed_tokens"]["embedding"]
    if _same(own, target_params["embed_tokens"]["embedding"]):
      config = dataclasses.replace(config, own_embedding=False)
  if not config.own_embedding:
    params["embed_tokens"] = target_params["embed_tokens"]
  if "lm_head" not in params:
    params["lm_head"] = target_rows(target, target_params, vocabulary)
  return LoadedDrafter(config, params, vocabulary, stored.notes)


def _same(a: jax.Array, b: jax.Array) -> bool:
  return a.shape == b.shape and bool(jnp.array_equal(a, b))


def target_rows(
  target: TargetConfig, target_params: dict, vocabulary: np.ndarray
) -> dict:
  """The target's head [D, W] cut to the draft vocabulary; by reference where
  it is whole and lies like that already."""
  if target.tied_head:
    table = target_params["embed_tokens"]["embedding"]
    return {"kernel": table[vocabulary].T}
  if np.array_equal(vocabulary, np.arange(target.vocab_size)):
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
  if config.sliding_window:
    raise ValueError("the official layout has no place for sliding_window")
  left = set() if own_head else {"lm_head/kernel"}
  if not config.own_embedding:
    left.add("embed_tokens/embedding")
  weights = {
    path: np.asarray(leaf).astype(jnp.dtype(dtype))
    for path, leaf in tensors.flatten(params).items()
    if path not in left
  }
  raw = own_config(config, notes, dtype)
  block = "midlayer" if config.kind == "eagle3" else "layers.0"
  write(folder, raw, weights, vocabulary, config.vocab_size, block)


def own_config(config: DrafterConfig, notes: dict, dtype: str) -> dict:
  """config.json of our own layout: the original's, and an entry of ours."""
  ours = notes | {
    "taps": list(config.taps),
    "draft_noise": config.draft_noise,
    "inputs": config.inputs,
    **{n: True for n in SWITCHES if getattr(config, n)},
  }
  raw = drafter_configs.flat(config, dtype) | {"eagle_jax": ours}
  if config.inputs != "feature+token":
    raw["architectures"] = [ABLATION]
  return raw


def write(
  folder: pathlib.Path,
  raw: dict,
  weights: dict[str, np.ndarray],
  vocabulary: np.ndarray,
  V: int,
  block: str,
) -> None:
  """Write config.json and model.safetensors.

  Args:
    weights: our path -> array in our layout.
    block: what the layout calls the layer, "midlayer" or "layers.0".
  """
  from safetensors.numpy import save_file

  named = {}
  for path, array in weights.items():
    array = array.T if path.endswith("kernel") else array
    named[_name(path, block)] = np.ascontiguousarray(array)
  folder.mkdir(parents=True, exist_ok=True)
  named |= draft_ids.tables(vocabulary, V)
  save_file(named, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")


def _name(path: str, block: str) -> str:
  """Our path -> the official name."""
  top, *inside, kind = path.split("/")
  name = ".".join([top.replace("fc_norm_", "fc_norm."), *inside])
  name += ".bias" if kind == "bias" else ".weight"
  outside = ("embed_tokens", "lm_head", "fc", "norm", "input_norm")
  return name if top in outside or "fc_norm" in top else f"{block}.{name}"
