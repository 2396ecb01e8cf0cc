"""The flags of `decode.py` as values: read, checked, merged with a config."""

import dataclasses
import difflib
import importlib.util
import os
import pathlib
from collections.abc import Sequence

from absl.flags import ListParser

from eagle_jax import generation, loading, prompts
from eagle_jax.errors import InputError, check_least
from eagle_jax.speculation import requests


@dataclasses.dataclass
class DecodeOptions:
  """The flags of `decode.py`, by name; their help texts explain them."""

  target: str = loading.DEFAULT_TARGET
  drafter: str | None = None
  drafter_window: int | None = None
  prompt: str | None = None
  prompts_file: str | None = None
  prompt_ids: str | None = None
  max_new_tokens: int = 512
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  seed: int = 0
  num_samples: int = 1
  draft_noise: float | None = None
  system: str | None = None
  raw: bool = False
  stop: Sequence[str] = ()
  method: str = "eagle"
  tree: str = "auto"
  tree_nodes: int | None = None
  tree_levels: int | None = None
  tree_branch: int | None = None
  batch_size: int = 1
  context: int | None = None
  ignore_eos: bool = False
  mesh: Sequence[str] | None = None
  dtype: str | None = None
  output: str | None = None
  compare: bool = False
  show: bool = False
  verbose: bool = False


def read_config(file: str) -> dict:
  """Field values of a configs/*.py file: what its get_config() returns."""
  path = pathlib.Path(file)
  if not path.is_file():
    raise InputError(f"config {file!r} is not a file")
  spec = importlib.util.spec_from_file_location("decode_config", path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    values = dict(module.get_config())
  except Exception as e:
    raise InputError(
      f"config {file!r} cannot be read ({type(e).__name__}: {e}): it needs a"
      " get_config() that returns a dict of decode.py's flags"
    ) from None
  known = [f.name for f in dataclasses.fields(DecodeOptions)]
  known.remove("verbose")
  for name in values:
    if name not in known:
      near = difflib.get_close_matches(name, known, 1)
      hint = f": did you mean {near[0]}?" if near else ""
      raise InputError(f"config {file!r}: unknown field {name!r}{hint}")
  return values


def from_flags(flags, verbose: bool) -> DecodeOptions:
  """Flags of the command line over the config file over the defaults."""
  given = {}
  for field in dataclasses.fields(DecodeOptions):
    if field.name in flags and flags[field.name].present:
      given[field.name] = flags[field.name].value
  config = read_config(flags.config) if flags.config else {}
  for name, value in config.items():
    config[name] = _fitting(flags, name, value)
  return DecodeOptions(**config | given | {"verbose": verbose})


def _fitting(flags, name: str, value):
  """A config file's value, refused where the flag would refuse it."""
  flag = flags[name]
  if value is None and flag.default is None:
    return None
  try:
    if isinstance(flag.parser, ListParser):  # "1,1,0", or a sequence
      items = value if isinstance(value, str) else list(value)
      return [str(item) for item in flag.parser.parse(items)]
    if not isinstance(flag.default, list):
      return flag.parser.parse(value)
    if not isinstance(value, list | tuple):
      raise TypeError
    return [flag.parser.parse(v) for v in value]
  except (TypeError, ValueError):
    raise InputError(
      f"config {flags.config!r}: {name} {value!r} must be of type"
      f" {flag.flag_type()}"
    ) from None


def inputs(o: DecodeOptions) -> list[str | list[dict] | list[int]] | None:
  """The prompts as text, messages or ids; None = chat."""
  given = [
    n
    for n in ("prompt", "prompts_file", "prompt_ids")
    if getattr(o, n) is not None
  ]
  if len(given) > 1:
    raise InputError(f"--{given[0]} and --{given[1]} exclude each other")
  if o.prompt_ids is not None:
    if o.system is not None or o.raw:
      raise InputError(
        "--prompt_ids are taken as they are: leave out --system and --raw"
      )
    return [prompts.parse_ids(o.prompt_ids)]
  if o.prompts_file is not None:
    return prompts.read(pathlib.Path(o.prompts_file))
  if o.prompt is not None:
    if not o.prompt:
      raise InputError("--prompt is empty: give it a text")
    return [o.prompt]
  return None


def check(o: DecodeOptions) -> None:
  """Refuses bad values before any weight is read."""
  loading.check_dtype(o.dtype)
  check_least(o, num_samples=1, max_new_tokens=1, batch_size=1)
  generation.check_method(o.method)
  if o.tree not in ("auto", *generation.TREES):
    raise InputError(
      f"tree {o.tree!r} is unknown: use one of auto,"
      f" {', '.join(generation.TREES)}"
    )
  loading.check_window(o.drafter_window)
  if o.method == "plain" and o.drafter_window is not None:
    raise InputError("--drafter_window is of the drafter: use --method eagle")
  if o.method == "plain" and o.compare:
    raise InputError("--compare compares with plain: use --method eagle")
  if o.show and o.batch_size > 1:
    raise InputError("--show draws one row: use --batch_size 1")
  if o.show and o.compare:
    raise InputError(
      "--show grows every tree twice: leave it out to --compare speeds"
    )
  if o.show and o.method == "plain":
    raise InputError("--show draws drafts: use --method eagle")
  requests.check_seed(o.seed)
  if o.system is not None and o.raw:
    raise InputError("--system needs the chat template: leave out --raw")
  if o.output is not None:
    folder = pathlib.Path(o.output).absolute().parent
    if not folder.is_dir():
      raise InputError(f"output folder {folder} does not exist: make it first")
    if os.path.isdir(o.output):
      raise InputError(f"output {o.output!r} is a folder: name a file")
    try:
      os.lstat(o.output)
    except FileNotFoundError:
      pass
    except OSError as e:
      raise InputError(
        f"output {o.output!r} cannot be written ({e.strerror})"
      ) from None


CHAT_LACKS = ("raw", "num_samples", "batch_size", "output", "compare", "show")


def check_chat(o: DecodeOptions) -> None:
  """Refuses what a chat would ignore."""
  for name in CHAT_LACKS:
    if getattr(o, name) != getattr(DecodeOptions, name):
      raise InputError(
        f"chat takes no --{name}: give a prompt with --prompt or --prompts_file"
      )
