"""Names and paths -> models: the one place that knows the defaults."""

import dataclasses
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax import sharding
from eagle_jax.checkpoints import drafters, gguf_target, hf_target, tensors
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target, cpu_layout
from eagle_jax.speculation.state import Models
from eagle_jax.speculation.tree import TreeSpec

DEFAULT_TARGET = gguf_target.DEFAULT
SHIPPED = pathlib.Path(__file__).parent / "drafters"
DEFAULT_DRAFTER = "smollm2-135m-eagle3"
WIDE_HEAD = 8192  # ids; a narrower head has no need of blocks
FEW_NODES = 8  # M up to which a product in blocks beats the visited rows
ACCEPTANCE = "acceptance.json"  # in a drafter folder, written by calibrate


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
  """A target ready to run. ends: end ids; tokenizer: None where none is."""

  name: str
  config: TargetConfig
  params: dict
  tokenizer: object
  ends: tuple[int, ...]

  def fingerprint(self) -> str:
    """Tells weights apart that share a name: for what is kept on disk."""
    digest = hashlib.sha256(repr((self.config, self.ends)).encode())
    for path, leaf in sorted(tensors.flatten(self.params).items()):
      digest.update(path.encode() + np.asarray(leaf[:1]).tobytes())
    return digest.hexdigest()[:16]

  @functools.cached_property
  def cpu_params(self) -> dict:
    """`params` in their layout for a CPU, made once."""
    return cpu_layout(self.params, self.config)


def _folder(
  name: str, what: str, weights: tuple[str, ...] = ("*.safetensors", "*.bin")
) -> pathlib.Path:
  """A folder on disk, else a hub name (owner/name); PyTorch files are fetched
  where there are no safetensors."""
  path = pathlib.Path(name).expanduser()
  try:
    if path.is_dir():
      return path
  except OSError as e:  # a name that no file can have
    raise InputError(f"{what} {name[:60]!r} is not a folder ({e})") from None
  if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
    raise InputError(
      f"{what} {name!r} is not a folder: give a model folder, a hub name"
      " (owner/name), or a built-in name"
      f" ({DEFAULT_TARGET if what == 'target' else ', '.join(shipped())})"
    )
  return _fetch(name, what, weights)


def _fetch(name: str, what: str, weights: tuple[str, ...]) -> pathlib.Path:
  """The hub's files: texts, and weights of the first kind that it has."""
  import huggingface_hub

  texts = ["*.json", "*.model", "*.jinja"]
  try:
    folder = huggingface_hub.snapshot_download(name, allow_patterns=texts)
    for kind in weights:
      huggingface_hub.snapshot_download(name, allow_patterns=[kind])
      if list(pathlib.Path(folder).glob(kind)):
        break
    return pathlib.Path(folder)
  except Exception as e:
    raise InputError(
      f"{what} {name!r} could not be fetched from the hub"
      f" ({type(e).__name__}): check the name, log in, or give a folder"
    ) from e


def is_default(name: str) -> bool:
  """Is it the embedded target, by its own or its hub name?"""
  return name.lower() in (DEFAULT_TARGET, f"huggingfacetb/{DEFAULT_TARGET}")


def target_folder(name: str, say) -> pathlib.Path:
  """A folder for --target: the embedded default, a path, or a hub name."""
  if is_default(name):
    return gguf_target.default_folder(say)
  return _folder(name, "target")


def shipped() -> list[str]:
  """Names of the drafters in the package."""
  return sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def _plain_tokenizer(folder: pathlib.Path) -> bool:
  """Is it a Llama's tokenizer.json as it stands? Transformers has exceptions
  for other models, and folders may bring classes of their own."""
  files = [folder / n for n in ("tokenizer_config.json", "config.json")]
  if not all(f.exists() for f in (*files, folder / "tokenizer.json")):
    return False
  tokenizer, model = map(hf_target.read_json, files)
  return (
    tokenizer.get("tokenizer_class") == "PreTrainedTokenizerFast"
    and "auto_map" not in tokenizer
    and model.get("model_type") == "llama"
  )


def load_tokenizer(folder: pathlib.Path):
  """The folder's tokenizer, or None where it has none."""
  names = ("tokenizer.json", "tokenizer.model", "vocab.json")
  if not any((folder / n).exists() for n in names):
    return None
  if _plain_tokenizer(folder):
    # as AutoTokenizer would, without importing every model: 1.4 seconds of a
    # start instead of 5.0
    from transformers import PreTrainedTokenizerFast as Tokenizer
  else:
    from transformers import AutoTokenizer as Tokenizer
  return Tokenizer.from_pretrained(folder)


def end_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """eos_token_id of generation_config.json, else of config.json: an id or a
  list of them."""
  for name in ("generation_config.json", "config.json"):
    file = folder / name
    if file.exists():
      found = hf_target.read_json(file).get("eos_token_id")
      if found is not None:
        return tuple(found) if isinstance(found, list) else (found,)
  return ()


def check_dtype(dtype: str | None) -> None:
  if dtype not in (None, "float32", "bfloat16"):
    raise InputError(f"dtype {dtype!r} must be float32 or bfloat16")


def load_target(
  name: str,
  dtype: str | None,
  say,
  mesh: Mesh | None = None,
  preset: str = "decode",
) -> LoadedTarget:
  """A target by name, on one device or laid out over a mesh.

  Args:
    dtype: None = `default_dtype`.
    preset: of `sharding`, where there is a mesh.
  """
  check_dtype(dtype)
  dtype = dtype or default_dtype()
  folder = target_folder(name, say)
  shard = lambda config, shapes: sharding.parameters(
    shapes, config, mesh, preset, say
  )
  config, params = hf_target.load(folder, dtype, shard if mesh else None)
  ends = end_ids(folder)
  wrong = [i for i in ends if not 0 <= i < config.vocab_size]
  if wrong:
    raise InputError(
      f"{folder}: eos_token_id {wrong[0]} is outside the vocabulary 0.."
      f"{config.vocab_size - 1}: mend generation_config.json"
    )
  return LoadedTarget(name, config, params, load_tokenizer(folder), ends)


def target_config(name: str, say) -> tuple[dict, TargetConfig]:
  """config.json of a target and ours of it, without reading any weight."""
  if is_default(name):
    folder = gguf_target.default_folder(say)
  else:
    folder = _folder(name, "target", ())
  raw = hf_target.read_config(folder)
  file = str(folder / "config.json")
  return raw, hf_target.target_config(raw, "float32", file)


def drafter_folder(name: str) -> pathlib.Path:
  """A shipped drafter by name, a folder, or a hub name."""
  return SHIPPED / name if name in shipped() else _folder(name, "drafter")


def check_window(window: int | None) -> None:
  if window is not None and window < 1:
    raise InputError(f"drafter_window {window} must be at least 1")


def load_drafter(
  name: str, target: LoadedTarget, say, window: int | None = None
) -> LoadedDrafter:
  """A shipped drafter by name, a folder, or a hub name; of any layout.

  Says so where the drafter was trained with another chat template: that
  costs acceptance, not correctness.

  Args:
    window: the drafter sees only so many of the last committed tokens;
      None = all.
  """
  check_window(window)
  folder = drafter_folder(name)
  drafter = drafters.load(folder, target.config, target.params)
  if window is not None:
    config = dataclasses.replace(drafter.config, sliding_window=window)
    drafter = dataclasses.replace(drafter, config=config)
  trained_with = drafter.notes.get("chat_template")
  now = getattr(target.tokenizer, "chat_template", None)
  if trained_with is not None and now is not None and trained_with != now:
    say(
      f"note: drafter {name} was trained with another chat template than the"
      " target's; expect fewer accepted drafts"
    )
  if (folder / ACCEPTANCE).exists():
    measured = hf_target.read_json(folder / ACCEPTANCE)
    drafter = dataclasses.replace(
      drafter, notes=drafter.notes | {"acceptance": measured}
    )
  return drafter


def load_pair(
  target: str,
  drafter: str | None,
  dtype: str | None,
  say,
  window: int | None = None,
  mesh: Mesh | None = None,
) -> tuple[LoadedTarget, LoadedDrafter]:
  """A target and its drafter; None = the built-in target's own one."""
  if drafter is None and not is_default(target):
    raise InputError(
      f"no drafter for target {target!r}: give one (--drafter), or decode"
      " plainly (decode.py --method plain)"
    )
  loaded = load_target(target, dtype, say, mesh)
  name = drafter or DEFAULT_DRAFTER
  return loaded, load_drafter(name, loaded, say, window)


def load_for(
  method: str,
  target: str,
  drafter: str | None,
  dtype: str | None,
  say,
  window: int | None = None,
  mesh: Mesh | None = None,
) -> tuple[LoadedTarget, LoadedDrafter | None]:
  """What "eagle" or "plain" decoding reads: `load_pair`, or the target."""
  if method == "plain":
    return load_target(target, dtype, say, mesh), None
  return load_pair(target, drafter, dtype, say, window, mesh)


def default_dtype() -> str:
  """float32 on CPU (bfloat16 is several times slower there), else bfloat16."""
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def lazy_head(nodes: int, platform: str, in_blocks: bool) -> bool:
  """Does the walk read the head node by node, or one product all M nodes?

  An accelerator reads the head once either way. For a CPU a product over M
  nodes costs several single rows, and only few of them with blocks: of 28M
  weights, one row 5.5 ms, 4 in blocks 7.4, 8 10.9, 16 15.7.
  """
  return platform == "cpu" and not (in_blocks and nodes <= FEW_NODES)


def models(
  target: LoadedTarget,
  drafter: LoadedDrafter | None,
  spec: TreeSpec,
  ignore_eos: bool = False,
  mesh: Mesh | None = None,
  place: bool = True,
) -> Models:
  """What a decode cycle needs; drafter None is plain decoding.

  Args:
    mesh: what to decode over; None = one device.
    place: lay everything out for decoding; False leaves the weights as they
      lie on the mesh (as training has them).
  """
  ends = np.zeros(target.config.vocab_size, bool)
  if not ignore_eos:
    ends[list(target.ends)] = True
  platform = jax.default_backend()
  # costs the memory of a second head, and of q, k and v twice
  on_cpu = (
    platform == "cpu" and mesh is None and target.config.vocab_size > WIDE_HEAD
  )
  taps = drafter.config.taps if drafter else ()
  drafter_params = None
  if drafter:
    drafter_params = drafter.cpu_params if on_cpu else drafter.params
  m = Models(
    target=Target(target.config, taps, on_cpu),
    drafter=Drafter(drafter.config, on_cpu) if drafter else None,
    spec=spec,
    lazy_head=lazy_head(spec.num_nodes, platform, on_cpu),
    mesh=mesh,
    target_params=target.cpu_params if on_cpu else target.params,
    drafter_params=drafter_params,
    vocabulary=jnp.asarray(drafter.vocabulary) if drafter else None,
    ends=jnp.asarray(ends),
  )
  if mesh is None or not place:
    return m
  return jax.device_put(m, sharding.decode_models(m, mesh))
