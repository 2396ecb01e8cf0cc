"""What a run shows: a bar, JSON lines, TensorBoard, and a folder that
explains itself."""

import dataclasses
import datetime
import json
import pathlib
import shlex
import subprocess
import sys
import time
from importlib import metadata

import jax
import tqdm

from eagle_jax import __version__
from eagle_jax.config import DrafterConfig, LayerConfig, TargetConfig
from eagle_jax.files import write_whole
from eagle_jax.training.config import TrainConfig

# Dense bfloat16 FLOP/s of one device, by the beginning of its device_kind,
# from the vendors' data sheets. Others have no MFU.
PEAKS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,  # v5p
  "TPU v6": 918e12,
  "TPU7x": 2307e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
}

README = """A training run of eagle_jax: a drafter for {target}.

  config.json     its config; the same command resumes the run
  run.json        command, versions, commit, devices, sizes, tokenizer
  log.jsonl       figures of steps, held-out rows and real decoding
  tensorboard/    the same: pip install tensorboard; tensorboard --logdir .
  checkpoints/    to resume from: the last ones and the best (Orbax)
  drafter/        the best drafter so far, in the official EAGLE layout:
                  decode.py --target {target} --drafter {folder}/drafter

alpha[i]: share of step i's drafts that hold the target's token, given that
all earlier ones did. tau: tokens a verify pass of a chain of these drafts.
decode: the same from real decoding with a tree, in tokens kept a pass.
"""


def peak_flops(kind: str) -> float | None:
  """FLOP/s of a device kind, where known; the longest name that fits."""
  found = [name for name in PEAKS if kind.startswith(name)]
  return PEAKS[max(found, key=len)] if found else None


def layer_flops(c: LayerConfig, wide: int, T: int) -> float:
  """Of one token through one layer, a multiply and an add being two.

  Args:
    wide: inputs of q, k and v. T: row length; a token sees half of it.
  """
  D, N, K, H = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_size
  attention = wide * (N + 2 * K) * H + N * H * D
  mlps = max(getattr(c, "experts_per_token", 0), 1)
  return 2 * (attention + 3 * D * c.mlp_size * mlps) + 4 * N * H * T / 2


def flops_per_token(
  c: TrainConfig, target: TargetConfig, drafter: DrafterConfig
) -> float:
  """Model FLOPs of a training step, for each token of its batch.

  Target: forward only, none where its features are kept. Drafter: forward and
  twice that backward, all rows in step 0 and the anchors in later ones. Heads:
  the drafter's both ways, the target's forward, on scored rows. What `remat`
  and `loss_chunk` compute again is not counted (so MFU falls with them).
  """
  T, D = c.row_length, target.hidden_size
  ran = 0.0
  if c.features == "online":
    ran = target.num_layers * layer_flops(target, D, T)
  scored = (c.anchor_rows or T) / T
  passes = 1 + (c.unroll_steps - 1) * scored
  wide = 2 * D if drafter.kind == "eagle3" else D
  fused = 2 * D * D * (len(drafter.taps) or 2)
  block = layer_flops(drafter, wide, T)
  if drafter.kind == "eagle":
    drafted = 3 * passes * (block + fused)
  else:  # fused once, on true features
    drafted = 3 * (passes * block + fused)
  head = 2 * D * drafter.draft_vocab_size * c.unroll_steps * scored
  return ran + drafted + (3 + 1) * head


def commit() -> str | None:
  """The commit of this source tree, with + where files were changed."""

  def git(*words):
    return subprocess.run(
      ["git", "-C", pathlib.Path(__file__).parent, *words],
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  try:
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.CalledProcessError):  # installed, or no git
    return None


def explain(folder: pathlib.Path, c: TrainConfig, facts: dict) -> None:
  """Write what the folder is and how it came to be; config.json last, since
  it marks a run that can be resumed.

  Args:
    facts: of this run's data, models and devices.
  """
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "README.md").write_text(
    README.format(target=c.target, folder=c.out)
  )
  versions = {
    name: metadata.version(name)
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
  }
  run = {
    "command": shlex.join(sys.argv),
    "commit": commit(),
    "versions": {"eagle_jax": __version__} | versions,
    "python": sys.version.split()[0],
  }
  (folder / "run.json").write_text(json.dumps(run | facts, indent=1) + "\n")
  config = json.dumps(dataclasses.asdict(c), indent=1)
  # last and whole: its presence tells a later start that this is a run
  write_whole(folder / "config.json", config + "\n")


def cut_log(file: pathlib.Path, step: int) -> None:
  """Drop rows after `step`, which a resumed run writes again."""
  if not file.exists():
    return
  kept = []
  for line in file.read_text().splitlines():
    try:
      row = json.loads(line)
    except json.JSONDecodeError:  # half a line, of a killed run
      continue
    if row["step"] <= step:
      kept.append(line)
  write_whole(file, "".join(line + "\n" for line in kept))


class Journal:
  """Bar, JSON lines and TensorBoard of process 0; silent elsewhere.

  Args:
    total, step: of the run, and where it begins now.
    tokens: of one step. flops: of one token, all devices together.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    total: int,
    step: int,
    tokens: int,
    flops: float,
  ):
    self.tokens, self.flops = tokens, flops
    self.mark: tuple[int, float] | None = None  # a finished step, and when
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    self.peak = peak and peak * jax.device_count()
    self.writes = jax.process_index() == 0
    self.bar = None
    if not self.writes:
      return
    import tensorboardX

    cut_log(folder / "log.jsonl", step)
    self.log = (folder / "log.jsonl").open("a", buffering=1)
    self.board = tensorboardX.SummaryWriter(
      str(folder / "tensorboard"), purge_step=step + 1 if step else None
    )
    terminal = sys.stderr.isatty()
    self.bar = tqdm.tqdm(
      total=total,
      initial=step,
      unit="step",
      mininterval=1.0 if terminal else 60.0,  # a log keeps every line
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self.writes:
      self.bar.close()
      self.log.close()
      self.board.close()

  def tick(self) -> None:
    """A step was sent off."""
    if self.bar is not None:
      self.bar.update()

  def restart(self, step: int) -> None:
    """The clock of `speed` starts anew: all steps up to this one are done, and
    what was done between steps (evaluation, saves) is not to count."""
    self.mark = (step, time.perf_counter())

  def speed(self, step: int) -> dict[str, float]:
    """tokens/s, and MFU where the peak is known, since the last call.

    Args:
      step: just finished. The first call starts the clock: before it lies
        compilation.
    """
    before, now = self.mark, time.perf_counter()
    self.mark = (step, now)
    if before is None or before[0] == step:
      return {}
    rate = (step - before[0]) * self.tokens / (now - before[1])
    figures = {"tokens_per_s": round(rate, 1)}
    if self.peak:
      figures["mfu"] = round(rate * self.flops / self.peak, 4)
    return figures

  def write(self, step: int, part: str, figures: dict) -> None:
    """A row of figures; lists go to TensorBoard entry by entry.

    Args:
      part: "train", "heldout" or "decode".
    """
    if not self.writes:
      return
    now = datetime.datetime.now().isoformat(timespec="seconds")
    row = {"step": step, "part": part, "time": now} | figures
    self.log.write(json.dumps(row) + "\n")
    for name, value in figures.items():
      values = value if isinstance(value, list) else [value]
      for i, x in enumerate(values):
        tag = f"{part}/{name}" + (f"/{i}" if isinstance(value, list) else "")
        self.board.add_scalar(tag, x, step)

  def show(self, figures: dict) -> None:
    """The newest figures beside the bar."""
    if self.bar is None:
      return
    alphas = " ".join(f"{a:.2f}" for a in figures["alpha"])
    line = f"loss {figures['loss']:.3f} alpha {alphas} tau {figures['tau']:.2f}"
    if "tokens_per_s" in figures:
      line += f" {figures['tokens_per_s']:.0f} tok/s"
    if "mfu" in figures:
      line += f" MFU {figures['mfu']:.0%}"
    self.bar.set_postfix_str(line)

  def say(self, line: str) -> None:
    """A line of its own, above the bar."""
    if self.writes:
      tqdm.tqdm.write(line)
