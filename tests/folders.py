"""Tiny model folders on disk, and the scripts with flags of their own."""

import functools
import importlib.util
import json
import pathlib
import re
import types
from unittest import mock

import absl.app  # noqa: F401 (before `script`: its flags are no script's)
import numpy as np
import tiny
from absl import flags
from safetensors.numpy import save_file

from eagle_jax import generation
from eagle_jax import script as shell
from eagle_jax.checkpoints import drafters, tensors
from eagle_jax.speculation import engine

SPECIAL = ("<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?'-+*/=()\n\"_ABCDEFGH"
UNK, END, SYSTEM, USER, ASSISTANT = range(len(SPECIAL))
TEMPLATE = (
  "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def ids_of(text: str) -> list[int]:
  """What the tiny tokenizer gives for a text without special tokens."""
  return [len(SPECIAL) + LETTERS.index(c) for c in text]


def tokenizer(folder: pathlib.Path) -> None:
  """A character a token: `tiny.V` tokens, chat template included."""
  from tokenizers import AddedToken, Tokenizer, decoders, models

  vocabulary = {c: i for i, c in enumerate([*SPECIAL, *LETTERS][: tiny.V])}
  made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
  made.decoder = decoders.Fuse()
  made.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
  made.save(str(folder / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "eos_token": "<|end|>",
    "clean_up_tokenization_spaces": False,
    "chat_template": TEMPLATE,
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def target(
  folder: pathlib.Path, ends: tuple[int, ...] = (END,), text: bool = True, **of
):
  """Write `tiny.target(**of)` as a Hugging Face folder; returns the model.

  Args:
    ends: end ids. text: with a tokenizer.
  """
  folder.mkdir(parents=True, exist_ok=True)
  made = tiny.target(ends=ends, **of)
  c = made.config
  weights = {}
  for path, leaf in tensors.flatten(made.params).items():
    name = re.sub(r"^layers_(\d+)", r"layers.\1", path)
    *parents, kind = name.split("/")
    name = ".".join([*parents, "bias" if kind == "bias" else "weight"])
    array = np.asarray(leaf, np.float32)
    array = array.T if kind == "kernel" else array
    head = "" if name.startswith("lm_head") else "model."
    weights[head + name] = np.ascontiguousarray(array)
  save_file(weights, folder / "model.safetensors", {"format": "pt"})
  config = {
    "model_type": c.family,
    "vocab_size": c.vocab_size,
    "hidden_size": c.hidden_size,
    "intermediate_size": c.mlp_size,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_kv_heads,
    "head_dim": c.head_size,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": c.rope_theta,
    "max_position_embeddings": c.max_positions,
    "tie_word_embeddings": c.tied_head,
    "eos_token_id": list(ends),
  }
  (folder / "config.json").write_text(json.dumps(config))
  if text:
    tokenizer(folder)
  return made


def drafter(folder: pathlib.Path, target, kind: str = "eagle", W: int = 48):
  """Write `tiny.drafter` of a target; returns it."""
  made = tiny.drafter(target, kind, W)
  drafters.save(
    folder, made.config, made.params, made.vocabulary, False, {}, "float32"
  )
  return made


def pair(
  base: pathlib.Path, ends: tuple[int, ...] = (END,)
) -> types.SimpleNamespace:
  """A small target and its drafter, as paths in text.

  One layer, an EAGLE-1 drafter: the shortest programs to compile.
  """
  made = target(base / "target", ends, num_layers=1)
  drafter(base / "drafter", made)
  return types.SimpleNamespace(
    target=str(base / "target"), drafter=str(base / "drafter"), made=made
  )


_PROGRAMS: dict[tuple, dict] = {}


def share_programs(patch) -> None:
  """Engines of one shape compile once a process, and the user's cache of
  compiled programs stays untouched.

  Args:
    patch: a monkeypatch.
  """
  init = engine.Engine.__init__

  def shared(self, models, batch_size, context):
    init(self, models, batch_size, context)
    key = (
      *(models.target, models.drafter, models.spec, models.lazy_head),
      *(batch_size, self._width, self.most, models.mesh),
    )
    self.programs = _PROGRAMS.setdefault(key, {})

  patch.setattr(engine.Engine, "__init__", shared)
  patch.setattr(generation, "use_compilation_cache", lambda: None)


def script(name: str) -> types.ModuleType:
  """A script as a module whose flags are its own, so that several scripts
  with flags of the same names live in one process."""
  own = flags.FlagValues()
  own["verbosity"] = flags.FLAGS["verbosity"]
  define = {
    n: functools.partial(getattr(flags, n), flag_values=own)
    for n in dir(flags)
    if n.startswith("DEFINE_")
  }
  spec = importlib.util.find_spec(name)
  module = importlib.util.module_from_spec(spec)
  with mock.patch.multiple(flags, FLAGS=own, **define):
    spec.loader.exec_module(module)
  return module


def call(module: types.ModuleType, name: str, *args: str) -> int:
  """Run a script's work on a command line as command `name`; its exit code."""
  for flag in module.F:
    module.F[flag].unparse()
  try:
    left = shell.parse(name, module.F, [module.__name__, *args])
    shell.main(name, module.run, module.F, left)
  except SystemExit as e:
    return e.code
  return 0
