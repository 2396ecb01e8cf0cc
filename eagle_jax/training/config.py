"""The description of one training run, and what it may not say."""

import dataclasses
import difflib
import json
import pathlib

from eagle_jax.config import INPUTS, SWITCHES, check_switches
from eagle_jax.errors import InputError, differences
from eagle_jax.training import data, losses


@dataclasses.dataclass
class TrainConfig:
  """One run. Fields may be overridden on the command line."""

  target: str
  data: tuple[str, ...]  # chats JSONL, or tfds: lines (training.dataset)
  heldout: tuple[str, ...]  # the same, never trained on
  out: str  # run folder
  # drafter
  kind: str
  taps: tuple[int, ...]  # empty with kind "eagle3": the official three
  draft_vocab_size: int  # cut to the target's vocabulary
  init: str  # "last_layer" | "random" | a drafter folder to go on from
  train_head: bool  # else the target's rows stay as they are
  inputs: str  # what a row reads: config.INPUTS; "feature+token" is EAGLE
  switches: tuple[str, ...]  # variants of "eagle3": config.SWITCHES
  mlp_size: int  # 0 = the target's, with experts times experts_per_token
  # batches
  row_length: int  # T
  batch_size: int  # rows a step, over all devices and processes
  epochs: int
  max_chats: int  # to train on, 0 = all; the draft vocabulary counts all
  max_bad_rows: int  # rows of data that may be dropped before it is refused
  long_chats: str  # "split" into windows of row_length | "cut" there
  pack_window: int  # chats packed together; later ones leave earlier rows be
  features: str  # "online" | "cached" (on disk, one process)
  # devices and memory: none of these changes a loss beyond rounding
  mesh: tuple[int, int, int]  # data, fsdp, tensor; one 0 = the rest
  accumulate: int  # parts that a batch is worked off in, one after another
  remat: bool  # recompute the drafter's activations in the backward pass
  loss_chunk: int  # rows whose vocabulary is alive at once; 0 = all
  # loss
  unroll_steps: int  # U
  anchor_rows: int  # R scored rows of each T, by chance; 0 = all
  step_decay: float
  feature_weight: float
  vocabulary_weight: float
  # U(-x, x) * 512 / document length on the input feature; 0 = off
  feature_noise: float
  # optimizer
  learning_rate: float
  schedule: str  # "cosine" to a hundredth | "linear" to 0, after the warm-up
  warmup_steps: int
  beta1: float
  beta2: float
  weight_decay: float
  clip_norm: float  # of all gradients together; 0 = off
  clip_value: float  # of each gradient entry; 0 = off
  # run, in steps
  log_every: int
  eval_every: int
  eval_rows: int
  decode_every: int  # real decoding of held-out prompts; 0 = never
  decode_prompts: int
  decode_tokens: int  # new tokens a prompt
  save_every: int
  keep_last: int  # checkpoints, besides the best one
  seed: int
  dtype: str  # of the target and the arithmetic; master weights are float32


# What may differ from the run that is resumed: where and how it runs.
FREE = (
  "out",
  "mesh",
  "accumulate",
  "remat",
  "loss_chunk",
  "log_every",
  "decode_every",
  "decode_prompts",
  "decode_tokens",
  "save_every",
  "keep_last",
)

_CHOICES = {
  "kind": ("eagle", "eagle3"),
  "features": ("online", "cached"),
  "inputs": INPUTS,
  "long_chats": data.LONG,
  "schedule": ("cosine", "linear"),
  "dtype": ("float32", "bfloat16"),
}
_LEAST = {
  "row_length": 1,
  "batch_size": 1,
  "epochs": 1,
  "unroll_steps": 1,
  "log_every": 1,
  "eval_every": 1,
  "eval_rows": 1,
  "save_every": 1,
  "keep_last": 1,
  "draft_vocab_size": 1,
  "pack_window": 1,
  "accumulate": 1,
  "decode_prompts": 1,
  "decode_tokens": 1,
  "max_chats": 0,
  "mlp_size": 0,
  "max_bad_rows": 0,
  "loss_chunk": 0,
  "decode_every": 0,
  "clip_norm": 0,
  "clip_value": 0,
  "feature_noise": 0,
  "warmup_steps": 0,
  "seed": 0,
  "feature_weight": 0,
  "vocabulary_weight": 0,
  "step_decay": 0,
}


def recipe(c: TrainConfig) -> losses.Recipe:
  return losses.Recipe(
    steps=c.unroll_steps,
    decay=c.step_decay,
    feature=c.feature_weight,
    vocabulary=c.vocabulary_weight,
    chunk=c.loss_chunk,
    remat=c.remat,
  )


def check(c: TrainConfig) -> None:
  """Refuses what no data could make right."""
  for name, allowed in _CHOICES.items():
    if getattr(c, name) not in allowed:
      raise InputError(
        f"{name} {getattr(c, name)!r} is unknown: use one of"
        f" {', '.join(allowed)}"
      )
  for name in c.switches:
    if name not in SWITCHES:
      raise InputError(
        f"switches: {name!r} is unknown: use some of {', '.join(SWITCHES)}"
      )
  check_switches(c.kind, c.switches)
  for name in ("data", "heldout"):
    if not getattr(c, name):
      raise InputError(
        f"no {name} given: name chat files, for example"
        f" --config.{name}=\"('chats.jsonl',)\""
      )
  for name, least in _LEAST.items():
    if getattr(c, name) < least:
      raise InputError(
        f"{name} {getattr(c, name)} must be at least {least}: mend the config"
      )
  if not 0 <= c.anchor_rows <= c.row_length:
    raise InputError(
      f"anchor_rows {c.anchor_rows} must be 0 (all) to row_length"
      f" {c.row_length}"
    )
  if c.batch_size % c.accumulate:
    raise InputError(
      f"batch_size {c.batch_size} does not divide into accumulate"
      f" {c.accumulate} parts: give a multiple"
    )
  both = set(c.data) & set(c.heldout)
  if both:
    raise InputError(
      f"{', '.join(sorted(both))} is both in data and in heldout: figures on"
      " trained chats say nothing"
    )


def same_run(c: TrainConfig, file: pathlib.Path) -> None:
  """Refuses to go on with a run of another config.

  Args:
    file: where an earlier start of the run wrote its config, if it did.
  """
  if not file.exists():
    return
  mine = json.loads(json.dumps(dataclasses.asdict(c)))
  theirs = json.loads(file.read_text())
  changes = differences(theirs, mine, [n for n in mine if n not in FREE])
  if changes:
    raise InputError(
      f"{file.parent} holds a run with another config ({changes}): give"
      " another --config.out, or that config"
    )


def check_overrides(argv: list[str]) -> None:
  """Refuses --config.field of a field that there is not, and offers one.

  Args:
    argv: the command line.
  """
  names = [f.name for f in dataclasses.fields(TrainConfig)]
  for word in argv:
    if not word.lstrip("-").startswith("config."):
      continue
    field = word.lstrip("-").removeprefix("config.").split("=")[0]
    if field in names:
      continue
    near = difflib.get_close_matches(field, names, 1, 0.0)[0]
    raise InputError(
      f"config has no field {field!r}: did you mean --config.{near}?"
    )
