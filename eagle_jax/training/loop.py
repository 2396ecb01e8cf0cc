"""The training run: models and data, then steps, figures and saves.

  build   config -> Run: target, drafter, rows, compiled steps, all placed
  train   Run -> steps until the end, or SIGTERM; resumes what the folder holds

Every process of a slice runs the same `train`; only process 0 writes files of
its own (Orbax lets each process write its shards).
"""

import dataclasses
import functools
import hashlib
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from eagle_jax import loading, sharding
from eagle_jax.checkpoints import drafters
from eagle_jax.checkpoints.drafter_configs import for_target, official_taps
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.loading import LoadedTarget
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.training import (
  batches,
  data,
  dataset,
  features,
  losses,
  start,
  watch,
)
from eagle_jax.training import config as configs
from eagle_jax.training import step as steps
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import Packed
from eagle_jax.training.decoder import Decoder
from eagle_jax.training.saves import Saves, fingerprint
from eagle_jax.training.step import Frozen, Networks, TrainState

Kept = Callable[[dict[str, np.ndarray]], tuple[np.ndarray, np.ndarray]]


class Stopped(Exception):
  """SIGTERM came; the run is saved and goes on where it is started again."""


@dataclasses.dataclass(frozen=True)
class TrainingData:
  """What is read: rows to train on, held-out rows, a digest of both files'
  contents, how often each id carries loss in the data (int64[V]), the draft
  vocabulary, and the rows to evaluate on."""

  packed: Packed
  held: Packed
  fingerprint: str
  counts: np.ndarray
  vocabulary: np.ndarray
  eval_rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
  """All that a run reads and never changes; placed and compiled.

  places: shardings of the TrainState. share: of each batch, `batches.share`.
  kept: features on disk, or None.
  """

  config: TrainConfig
  out: pathlib.Path
  mesh: Mesh
  target: LoadedTarget
  networks: Networks
  corpus: TrainingData
  frozen: Frozen
  places: TrainState
  total: int
  share: tuple[int, int]
  kept: Kept | None
  train_step: Callable
  eval_step: Callable


@dataclasses.dataclass
class Progress:
  """What a run has come to."""

  state: TrainState
  best_tau: float


# Build ----------------------------------------------------------------------


def load_target(c: TrainConfig, mesh: Mesh, say) -> LoadedTarget:
  """The target on the mesh; chats need its tokenizer and template."""
  loaded = loading.load_target(c.target, c.dtype, say, mesh, "train")
  if not getattr(loaded.tokenizer, "chat_template", None):
    raise InputError(
      f"target {c.target!r} has no tokenizer with a chat template: training on"
      " chats needs one"
    )
  return loaded


def read_corpus(
  c: TrainConfig, target: LoadedTarget, W: int, out: pathlib.Path, say
) -> TrainingData:
  """Tokenise all chats, or find them tokenised, and pack them; W: ids of the
  draft vocabulary."""
  T, V = c.row_length, target.config.vocab_size

  def read(sources: tuple[str, ...]) -> dataset.Corpus:
    found = dataset.prepare(
      sources, target.tokenizer, out.parent / "documents", c.max_bad_rows
    )
    long = dataset.long_line(found.lengths, T, c.long_chats)
    for line in (", ".join(sources), *found.lines(), *([long] if long else [])):
      say(line)
    return found

  trained = read(c.data)
  packed = trained.pack(T, c.pack_window, c.long_chats, c.max_chats)
  spared = read(c.heldout)
  held = spared.pack(T, c.pack_window, c.long_chats, 0)
  counts = trained.counts_of(V)
  vocabulary = data.draft_vocabulary(counts, W)
  # Packing sorts by length: evaluate on rows of all lengths.
  rows = np.random.default_rng(0).permutation(len(held))[: c.eval_rows]
  # A large corpus is not read twice: its first rows hold the longest chats.
  first = packed.take(np.arange(min(len(packed), 256)))
  _check_rows(first, c.unroll_steps, "data")
  _check_rows(held.take(rows), c.unroll_steps, "heldout")
  both = f"{trained.fingerprint} {spared.fingerprint}"
  return TrainingData(packed, held, both, counts, vocabulary, rows)


def longest_answer(rows: dict[str, np.ndarray]) -> int:
  """Most supervised tokens in a row, the first of a document left out.

  Step i counts a row t whose tokens t+1 .. t+2+i are supervised and, with t,
  of one document:

    positions  0 1 2 3 4 0 1      mask  0 0 1 1 1 1 1      3
  """
  longest, run = 0, np.zeros(len(rows["row"]), np.int32)
  columns = zip(rows["mask"].T, rows["positions"].T, strict=True)
  for mask, positions in columns:
    run = np.where(mask & (positions > 0), run + 1, 0)
    longest = max(longest, int(run.max()))
  return longest


def _check_rows(
  rows: dict[str, np.ndarray], unroll_steps: int, name: str
) -> None:
  """Refuses rows of which the last unrolled step would count none."""
  found = longest_answer(rows)
  if found < unroll_steps + 1:
    raise InputError(
      f"{name}: no answer has {unroll_steps + 1} tokens in a row (the longest:"
      f" {found}), so that step {unroll_steps} would have nothing to count:"
      " give longer answers or a longer row_length"
    )


def _describe(corpus: TrainingData, say) -> None:
  packed, counts = corpus.packed, corpus.counts
  covered = counts[corpus.vocabulary].sum() / counts.sum()
  say(
    f"{len(packed)} rows of {packed.T} tokens, padding {packed.padding:.1%};"
    f" the draft vocabulary covers {covered:.2%} of all supervised tokens"
  )


def drafter_config(c: TrainConfig, target: TargetConfig) -> DrafterConfig:
  """The drafter that the config describes, of the target's layer shape."""
  try:
    return for_target(
      target,
      c.kind,
      min(c.draft_vocab_size, target.vocab_size),
      tuple(c.taps),
      c.mlp_size,
      inputs=c.inputs,
      **dict.fromkeys(c.switches, True),
    )
  except ValueError as e:
    raise InputError(f"the config describes no drafter: {e}") from None


def _kept_features(
  c: TrainConfig,
  out: pathlib.Path,
  target: LoadedTarget,
  corpus: TrainingData,
  say,
) -> Kept | None:
  if c.features == "online":
    return None
  taps = tuple(c.taps) or official_taps(target.config.num_layers)
  kept = features.Cache(
    out.parent / "features",
    Target(target.config, taps),
    target.params,
    target.fingerprint(),
    c.kind,
  )
  for packed in (corpus.packed, corpus.held):
    say(kept.describe(packed))
  return kept


def build(c: TrainConfig, say) -> tuple[Run, TrainState]:
  """The run and its state at step 0.

  Raises:
    InputError: a config or file that cannot be used.
  """
  out = pathlib.Path(c.out).absolute()
  mesh = sharding.make_mesh(c.mesh)
  share = batches.share(mesh, c.batch_size // c.accumulate)
  if c.features == "cached" and jax.process_count() > 1:
    raise InputError(
      "features 'cached' is for one process: use features='online'"
    )
  target = load_target(c, mesh, say)
  if c.row_length > target.config.max_positions:
    raise InputError(
      f"row_length {c.row_length} is more than the target's"
      f" {target.config.max_positions} positions: give shorter rows"
    )
  config = drafter_config(c, target.config)  # refuses before chats are read
  corpus = read_corpus(c, target, config.draft_vocab_size, out, say)
  total = len(corpus.packed) // c.batch_size * c.epochs
  if not total:
    raise InputError(
      f"batch_size {c.batch_size} is more than the {len(corpus.packed)} rows of"
      " data: give more data or a smaller batch_size"
    )
  optimizer = steps.make_optimizer(c, total)
  params, vocabulary = start.parameters(
    c.init, c.seed, config, target, corpus.vocabulary, mesh, say
  )
  corpus = dataclasses.replace(corpus, vocabulary=vocabulary)
  _describe(corpus, say)
  n = Networks(Target(target.config, config.taps), Drafter(config))
  trained, rest = steps.split(params, c.train_head)
  head = start.head_of_target(config, target, vocabulary, mesh)["kernel"]
  kernel = params["lm_head"]["kernel"]
  if not c.train_head and not bool(jnp.array_equal(kernel, head)):
    raise InputError(
      f"init {c.init!r} has a trained head, which train_head False would"
      " neither train nor store: set train_head to True"
    )
  head = head if c.train_head else kernel  # one array, not two alike
  frozen = Frozen(target.params, rest, head, vocabulary)
  frozen_places = steps.frozen_shardings(frozen, n, mesh, lambda line: None)
  frozen = start.placed(frozen, frozen_places)
  begin = lambda params: steps.initial_state(c, optimizer, params)
  places = steps.state_shardings(
    jax.eval_shape(begin, trained), optimizer, n, mesh, lambda line: None
  )
  run = Run(
    config=c,
    out=out,
    mesh=mesh,
    target=target,
    networks=n,
    corpus=corpus,
    frozen=frozen,
    places=places,
    total=total,
    share=share,
    kept=_kept_features(c, out, target, corpus, say),
    train_step=steps.jit_train_step(
      steps.make_train_step(c, n, optimizer, mesh), places, frozen_places, mesh
    ),
    eval_step=jax.jit(
      steps.make_eval_step(c, n, mesh), out_shardings=sharding.replicated(mesh)
    ),
  )
  return run, jax.jit(begin, out_shardings=places)(trained)


# Pieces of a step -------------------------------------------------------------


def batch_of(run: Run, rows: dict[str, np.ndarray]):
  """This process's rows as part of the global batch."""
  place = sharding.batch(run.mesh, "train")
  found = run.kept(rows) if run.kept else None
  return batches.to_devices(rows, found, run.config.dtype, place)


def evaluate(run: Run, state: TrainState) -> dict:
  """Figures of the held-out rows, one row a data and fsdp device at a time."""
  size = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
  index, count = batches.share(run.mesh, size)
  mine = slice(index * size // count, (index + 1) * size // count)
  reports, rows = [], run.corpus.eval_rows
  for at in range(0, len(rows), size):
    taken = run.corpus.held.take(rows[at : at + size])
    taken = {k: v[mine] for k, v in batches.padded(taken, size).items()}
    batch = batch_of(run, taken)
    reports.append(run.eval_step(state.params, run.frozen, batch))
  summed = jax.tree.map(lambda *x: np.sum(x, axis=0), *jax.device_get(reports))
  return losses.figures(summed)


def export(run: Run, state: TrainState, figures: dict) -> None:
  """Write the drafter as it is now to the run's folder `drafter`."""
  everywhere = sharding.replicated(run.mesh)
  whole = jax.jit(lambda p: p, out_shardings=everywhere)(state.params)
  if jax.process_index():
    return
  c, step = run.config, int(state.step)
  part, folder = run.out / "drafter.part", run.out / "drafter"
  shutil.rmtree(part, ignore_errors=True)
  drafters.save(
    part,
    run.networks.drafter.config,
    whole | run.frozen.drafter,
    run.corpus.vocabulary,
    own_head=c.train_head,
    notes={
      "target": run.target.name,
      "chat_template": run.target.tokenizer.chat_template,
      "trained_steps": step,
      "trained_tokens": step * c.batch_size * c.row_length,
      "unroll_steps": c.unroll_steps,
      "heldout": {k: figures[k] for k in ("alpha", "tau")},
    },
    dtype="bfloat16",
  )
  if folder.exists():
    shutil.rmtree(folder)
  part.rename(folder)


def make_decoder(run: Run, state: TrainState) -> Callable | None:
  """state -> figures of real decoding; None where the config wants none."""
  c = run.config
  if not c.decode_every:
    return None
  complete = lambda state: state.params | run.frozen.drafter
  decoder = Decoder(
    run.target,
    LoadedDrafter(
      run.networks.drafter.config, complete(state), run.corpus.vocabulary, {}
    ),
    run.mesh,
    run.corpus.held,
    c.decode_prompts,
    c.decode_tokens,
  )
  return lambda state: decoder(complete(state))


class Stopper:
  """Has SIGTERM come? With several processes, has it come to any of them, and
  has this step been agreed on? JAX's runtime tells (it holds the signal then).
  """

  def __init__(self):
    self.called = False

  def __enter__(self):
    self.alone = jax.process_count() == 1
    # Python lets only the main thread handle signals.
    main = threading.current_thread() is threading.main_thread()
    self.handles = self.alone and main
    if self.handles:
      self.before = signal.signal(signal.SIGTERM, self._call)
    return self

  def _call(self, *_):
    self.called = True

  def __exit__(self, *_):
    if self.handles:
      signal.signal(signal.SIGTERM, self.before)

  def reached(self, step: int) -> bool:
    if self.alone:
      return self.called
    return multihost_utils.reached_preemption_sync_point(step)


# The run ----------------------------------------------------------------------


def facts(run: Run, state: TrainState) -> dict:
  """What run.json says besides versions."""
  device = jax.devices()[0]
  count = lambda tree: sum(a.size for a in jax.tree.leaves(tree))
  return {
    "devices": f"{jax.device_count()} {device.device_kind}",
    "processes": jax.process_count(),
    "mesh": dict(run.mesh.shape),
    "steps": run.total,
    "rows": len(run.corpus.packed),
    "heldout_rows": len(run.corpus.held),
    "target_family": run.target.config.family,
    "target_parameters": count(run.target.params),
    "trained_parameters": count(state.params),
    "tokenizer": fingerprint(run.target.tokenizer),
    "chat_template": run.target.tokenizer.chat_template,
  }


def train(c: TrainConfig, say=print) -> pathlib.Path:
  """Train, or resume what `c.out` holds. Returns the best drafter's folder.

  Raises:
    InputError: a config or file that cannot be used.
    Stopped: SIGTERM came; all is saved.
  """
  if jax.process_index():
    say = lambda line: None
  configs.check(c)
  out = pathlib.Path(c.out).absolute()
  configs.same_run(c, out / "config.json")
  run, state = build(c, say)
  decoder = make_decoder(run, state)  # refuses before the run's folder is made
  index, count = run.share
  rows = data.iterator(
    run.corpus.packed, c.batch_size, c.seed, index, count, c.epochs
  )
  if not (out / "config.json").exists() and not jax.process_index():
    watch.explain(out, c, facts(run, state))
  tokenizer = run.target.tokenizer
  same = {
    "chat template": tokenizer.chat_template,
    "tokenizer": fingerprint(tokenizer),
    "data": run.corpus.fingerprint,
    # decides what a trained head's columns mean
    "draft vocabulary": hashlib.sha256(
      np.asarray(run.corpus.vocabulary, np.int32).tobytes()
    ).hexdigest()[:16],
  }
  flops = watch.flops_per_token(
    c, run.target.config, run.networks.drafter.config
  )
  shapes = sharding.shapes(state, run.places)
  progress = Progress(state, 0.0)
  del state  # a resumed run holds its own alone
  with (
    Saves(out / "checkpoints", c.keep_last, same) as saves,
    Stopper() as stop,
  ):
    if found := saves.restore(shapes):
      progress.state, position, progress.best_tau = found
      rows.set_state(position)
      say(f"resumed at step {int(progress.state.step)} of {run.total}")
    step = int(progress.state.step)
    tokens = c.batch_size * c.row_length
    with watch.Journal(out, run.total, step, tokens, flops) as journal:
      _steps(run, progress, rows, saves, stop, journal, decoder)
  return out / "drafter"


def _steps(
  run: Run,
  progress: Progress,
  rows: grain.DatasetIterator,
  saves: Saves,
  stop: Stopper,
  journal: watch.Journal,
  decoder: Callable | None,
) -> None:
  """From where `progress` is to the end, or to SIGTERM."""
  c = run.config
  rate = steps.learning_rate(c, run.total)
  pending = None  # the report of the step before, fetched while this one runs

  def record() -> None:
    step, report = pending
    if step % c.log_every == 0:
      report = jax.device_get(report)
      figures = {n: float(report[n]) for n in ("loss", "grad_norm")}
      figures |= losses.figures(report)
      figures |= {"learning_rate": float(rate(step - 1))} | journal.speed(step)
      journal.write(step, "train", figures)
      journal.show(figures)

  for step in range(int(progress.state.step) + 1, run.total + 1):
    batch = batch_of(run, next(rows))
    progress.state, report = run.train_step(progress.state, run.frozen, batch)
    journal.tick()
    if pending:
      record()
    pending = (step, report)
    # A host that is taken away leaves time for a save, not for figures.
    stopped = stop.reached(step) and step < run.total
    due = functools.partial(_due, step, run.total)
    evaluates = due(c.eval_every) and not stopped
    decodes = decoder and due(c.decode_every) and not stopped
    keeps = evaluates or due(c.save_every) or stopped
    if not (keeps or decodes):
      continue
    record()
    pending = None
    tau = _evaluated(run, progress, step, journal) if evaluates else None
    if decodes:
      journal.write(step, "decode", decoder(progress.state))
    if keeps:
      saves.save(step, progress.state, rows.get_state(), progress.best_tau, tau)
    if stopped:
      raise Stopped(
        f"stopped by SIGTERM and saved at step {step} of {run.total}"
      )
    journal.restart(step)


def _due(step: int, total: int, every: int) -> bool:
  """Each `every` steps and at the end; 0 = never."""
  return every > 0 and (step % every == 0 or step == total)


def _evaluated(
  run: Run, progress: Progress, step: int, journal: watch.Journal
) -> float:
  """Held-out tau; the drafter is exported where it is the best so far."""
  figures = evaluate(run, progress.state)
  journal.write(step, "heldout", figures)
  alphas = " ".join(f"{a:.3f}" for a in figures["alpha"])
  journal.say(
    f"step {step}: held-out alpha {alphas}, chain tau {figures['tau']:.3f}"
  )
  if figures["tau"] > progress.best_tau:
    progress.best_tau = figures["tau"]
    export(run, progress.state, figures)
  return figures["tau"]
