"""Names and paths -> models: the one place that knows the defaults."""

import pathlib

import jax
import jax.numpy as jnp

from eagle_jax.checkpoints import gguf_target, hf_target
from eagle_jax.config import TargetConfig
from eagle_jax.errors import InputError


def target_folder(name: str, say) -> pathlib.Path:
  """A folder for --target: the embedded default, a path, or a hub name."""
  if name.lower() in (
    gguf_target.DEFAULT,
    f"huggingfacetb/{gguf_target.DEFAULT}",
  ):
    return gguf_target.default_folder(say)
  path = pathlib.Path(name).expanduser()
  if path.is_dir():
    return path
  if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
    raise InputError(
      f"target {name!r} is not a folder: give a Hugging Face model folder, a"
      f" hub name (owner/name), or {gguf_target.DEFAULT}"
    )
  import huggingface_hub

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]
      )
    )
  except Exception as e:
    raise InputError(
      f"target {name!r} could not be fetched from the hub"
      f" ({type(e).__name__}): check the name, log in, or give a folder"
    ) from e


def load_tokenizer(folder: pathlib.Path):
  """The folder's tokenizer, or None where it has none."""
  names = ("tokenizer.json", "tokenizer.model", "vocab.json")
  if not any((folder / n).exists() for n in names):
    return None
  from transformers import AutoTokenizer

  return AutoTokenizer.from_pretrained(folder)


def load_target(
  name: str, dtype: str, say
) -> tuple[TargetConfig, dict, object, str]:
  """Config, parameters, tokenizer (or None) and the name for records."""
  folder = target_folder(name, say)
  config, params = hf_target.load(folder, dtype)
  return config, params, load_tokenizer(folder), name


def default_dtype() -> str:
  """float32 on CPU (bfloat16 is several times slower there), else bfloat16."""
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def dtype_of(name: str):
  return jnp.dtype(name)
