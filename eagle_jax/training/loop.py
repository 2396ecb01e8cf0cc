"""The training run: data, step, held-out figures, checkpoints. One function."""

import dataclasses
import datetime
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from flax import struct

from eagle_jax import loading
from eagle_jax.checkpoints import drafters
from eagle_jax.config import DrafterConfig
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.training import data, dataset, features, losses, start


@dataclasses.dataclass
class TrainConfig:
  """One run. Paths may be overridden on the command line."""

  target: str
  data: tuple[str, ...]  # chats JSONL, or tfds: lines (training.dataset)
  heldout: tuple[str, ...]  # the same, never trained on
  out: str  # run folder
  # drafter
  kind: str
  taps: tuple[int, ...]  # empty with kind "eagle3": the official three
  draft_vocab_size: int
  init: str  # "last_layer" | "random" | a drafter folder to go on from
  train_head: bool  # else the target's rows stay as they are
  # batches
  row_length: int  # T
  batch_size: int  # rows a step
  epochs: int
  max_chats: int  # 0 = all
  max_bad_rows: int  # rows of data that may be dropped before it is refused
  long_chats: str  # "split" into windows of row_length | "cut" there
  pack_window: int  # chats packed together; later ones leave earlier rows be
  features: str  # "online" | "cached"
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
  warmup_steps: int
  beta1: float
  beta2: float
  weight_decay: float
  clip_norm: float
  # run
  eval_every: int  # steps
  eval_rows: int
  save_every: int
  seed: int
  dtype: str


@struct.dataclass
class TrainState:
  """Donated to each step. frozen tables are not in it."""

  step: jax.Array
  params: dict
  optimizer: optax.OptState


def split(params: dict, train_head: bool) -> tuple[dict, dict]:
  """(trainable, frozen) top-level entries of a drafter's parameters."""
  frozen = {"embed_tokens"} | (set() if train_head else {"lm_head"})
  return (
    {k: v for k, v in params.items() if k not in frozen},
    {k: v for k, v in params.items() if k in frozen},
  )


def make_optimizer(c: TrainConfig, total: int) -> optax.GradientTransformation:
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, c.learning_rate, c.warmup_steps, total, c.learning_rate * 0.01
  )
  return optax.chain(
    optax.clip_by_global_norm(c.clip_norm),
    optax.adamw(schedule, c.beta1, c.beta2, weight_decay=c.weight_decay),
  )


def make_train_step(
  c: TrainConfig, drafter: Drafter, optimizer: optax.GradientTransformation
):
  """(state, frozen, target_head, vocabulary, batch) -> (state, report).

  Pure and unjitted: the caller jits it, with shardings on a mesh. Noise is
  keyed by (seed, step), so a resumed run draws the same; so are the anchors.
  """
  weights = losses.Weights(c.feature_weight, c.vocabulary_weight, c.step_decay)

  def train_step(state, frozen, target_head, vocabulary, batch):
    key = jax.random.fold_in(jax.random.key(c.seed), state.step)
    anchors = None
    if c.anchor_rows:
      rows_key = jax.random.fold_in(key, 1)
      anchors = losses.draw_anchors(batch, c.anchor_rows, rows_key)
    if c.feature_noise:
      noise = jax.random.uniform(
        key, batch.features.shape, minval=-1.0, maxval=1.0
      )
      width = c.feature_noise * 512 / losses.document_lengths(batch)
      noise = (noise * width[..., None]).astype(batch.features.dtype)
      batch = batch.replace(features=batch.features + noise)

    def loss_of(params):
      return losses.losses(
        drafter,
        params | frozen,
        batch,
        vocabulary,
        target_head,
        c.unroll_steps,
        weights,
        anchors,
      )

    (loss, report), grads = jax.value_and_grad(loss_of, has_aux=True)(
      state.params
    )
    updates, opt = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    report = report | {"loss": loss, "grad_norm": optax.global_norm(grads)}
    return TrainState(state.step + 1, params, opt), report

  return train_step


def _check(c: TrainConfig) -> None:
  for name, allowed in {
    "kind": ("eagle", "eagle3"),
    "features": ("online", "cached"),
    "long_chats": data.LONG,
    "dtype": ("float32", "bfloat16"),
  }.items():
    if getattr(c, name) not in allowed:
      raise InputError(
        f"{name} {getattr(c, name)!r} is unknown: use one of"
        f" {', '.join(allowed)}"
      )
  for name in ("data", "heldout"):
    if not getattr(c, name):
      raise InputError(
        f"no {name} given: name chat files, for example"
        f" --config.{name}=\"('chats.jsonl',)\""
      )
  for name in (
    "row_length",
    "batch_size",
    "epochs",
    "unroll_steps",
    "eval_every",
    "eval_rows",
    "save_every",
    "draft_vocab_size",
    "pack_window",
  ):
    if getattr(c, name) < 1:
      raise InputError(
        f"{name} {getattr(c, name)} must be at least 1: mend the config"
      )
  if not 0 <= c.anchor_rows <= c.row_length:
    raise InputError(
      f"anchor_rows {c.anchor_rows} must be 0 (all) to row_length"
      f" {c.row_length}"
    )
  both = set(c.data) & set(c.heldout)
  if both:
    raise InputError(
      f"{', '.join(sorted(both))} is both in data and in heldout: figures on"
      " trained chats say nothing"
    )


def _same_run(c: TrainConfig, file: pathlib.Path) -> None:
  """Write the run's config, or refuse to go on with another one."""
  mine = json.loads(json.dumps(dataclasses.asdict(c)))
  if file.exists():
    theirs = json.loads(file.read_text())
    other = [n for n in mine if n != "out" and mine[n] != theirs.get(n)]
    if other:
      changes = ", ".join(f"{n} {theirs.get(n)} to {mine[n]}" for n in other)
      raise InputError(
        f"{file.parent} holds a run with another config ({changes}): give"
        " another --config.out, or that config"
      )
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(mine, indent=1) + "\n")


def train(c: TrainConfig, say=print) -> pathlib.Path:
  """Train, or resume what `c.out` holds. Returns the best drafter's folder.

  Raises:
    InputError: a config or file that cannot be used.
  """
  _check(c)
  out = pathlib.Path(c.out).absolute()
  loaded = loading.load_target(c.target, c.dtype, say)
  if not getattr(loaded.tokenizer, "chat_template", None):
    raise InputError(
      f"target {c.target!r} has no tokenizer with a chat template: training on"
      " chats needs one"
    )
  target_config, target_params = loaded.config, loaded.params
  tokenizer, name = loaded.tokenizer, loaded.name
  T = c.row_length
  read = lambda sources: dataset.prepare(
    sources, tokenizer, out.parent / "documents", c.max_bad_rows
  )
  corpus, held_corpus = read(c.data), read(c.heldout)
  packed = corpus.pack(T, c.pack_window, c.long_chats, c.max_chats)
  held = held_corpus.pack(T, c.pack_window, c.long_chats, 0)
  for read_of, name_of in ((corpus, c.data), (held_corpus, c.heldout)):
    long = dataset.long_line(read_of.lengths, T, c.long_chats)
    for line in (
      ", ".join(name_of),
      *read_of.lines(),
      *([long] if long else []),
    ):
      say(line)
  V = target_config.vocab_size
  W = min(c.draft_vocab_size, V)
  counts = corpus.counts_of(V)
  vocabulary = data.draft_vocabulary(counts, W)
  tapped = c.kind == "eagle3" or c.features == "cached"
  taps = tuple(c.taps)
  if tapped and not taps:
    taps = drafters.official_taps(target_config.num_layers)
  if max(taps, default=0) > target_config.num_layers:
    raise InputError(
      f"taps {taps} reach past the target's {target_config.num_layers} layers"
    )
  config = DrafterConfig(
    kind=c.kind,
    vocab_size=V,
    draft_vocab_size=W,
    taps=taps if c.kind == "eagle3" else (),
    hidden_size=target_config.hidden_size,
    mlp_size=target_config.mlp_size,
    num_heads=target_config.num_heads,
    num_kv_heads=target_config.num_kv_heads,
    head_size=target_config.head_size,
    norm_eps=target_config.norm_eps,
    rope_theta=target_config.rope_theta,
    max_positions=target_config.max_positions,
    # the official layout has biases, but no q/k norm and no rope scaling
    qkv_bias=target_config.qkv_bias,
    dtype=c.dtype,
  )
  params, vocabulary = start.parameters(
    c.init, c.seed, config, loaded, vocabulary, say
  )
  say(
    f"{len(packed)} rows of {T} tokens, padding {packed.padding:.1%}; the draft"
    f" vocabulary covers {counts[vocabulary].sum() / counts.sum():.2%} of the"
    " supervised tokens"
  )
  params, frozen = split(params, c.train_head)
  target_head = drafters.target_rows(target_config, target_params, vocabulary)[
    "kernel"
  ]
  drafter = Drafter(config)
  target = Target(target_config, config.taps)

  steps_an_epoch = len(packed) // c.batch_size
  if steps_an_epoch < 1:
    raise InputError(
      f"batch_size {c.batch_size} is more than the {len(packed)} rows of data"
    )
  total = steps_an_epoch * c.epochs
  if c.warmup_steps >= total:
    raise InputError(
      f"warmup_steps {c.warmup_steps} must be below the run's {total} steps"
    )
  optimizer = make_optimizer(c, total)
  # Copies, since the state is donated and the target's arrays are not ours;
  # float32, since the optimizer's steps are too small for bfloat16.
  params = jax.tree.map(lambda a: jnp.array(a, jnp.float32), params)
  state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
  train_step = jax.jit(make_train_step(c, drafter, optimizer), donate_argnums=0)
  weights = losses.Weights(c.feature_weight, c.vocabulary_weight, c.step_decay)
  eval_step = jax.jit(
    lambda p, f, h, v, b: losses.losses(
      drafter, p | f, b, v, h, c.unroll_steps, weights, None
    )[1]
  )

  if c.features == "cached":
    folder = out.parent / "features"
    reader = Target(target_config, taps)
    get_train, get_held = (
      features.Cache(
        folder, reader, target_params, p, loaded.fingerprint(), c.kind, say
      )
      for p in (packed, held)
    )
  else:
    run = jax.jit(
      lambda p, t, d, x: features.target_features(target, p, t, d, x)
    )
    get_train = get_held = lambda rows: run(
      target_params, rows["tokens"], rows["documents"], rows["positions"]
    )

  def batch_of(get, rows):
    fused, final = get(rows)
    return losses.Batch(
      *(rows[f] for f in ("tokens", "mask", "documents", "positions")),
      jnp.asarray(fused, c.dtype),
      jnp.asarray(final, c.dtype),
    )

  _same_run(c, out / "config.json")
  manager = ocp.CheckpointManager(
    out / "checkpoints",
    options=ocp.CheckpointManagerOptions(max_to_keep=2),
  )
  batches = data.iterator(
    packed,
    c.batch_size,
    c.seed,
    jax.process_index(),
    jax.process_count(),
    c.epochs,
  )
  best_tau = 0.0
  if manager.latest_step() is not None:
    restored = manager.restore(
      manager.latest_step(),
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(state), facts=ocp.args.JsonRestore()
      ),
    )
    state, facts = restored["state"], restored["facts"]
    best_tau = facts["best_tau"]
    batches.set_state(facts["data"])
    say(f"resumed at step {int(state.step)} of {total}")

  def evaluate() -> dict:
    # Packing sorts by length: take rows of all lengths.
    rows = np.random.default_rng(0).permutation(len(held))[: c.eval_rows]
    reports = [
      eval_step(
        state.params,
        frozen,
        target_head,
        vocabulary,
        batch_of(get_held, held.take(rows[i : i + 1])),
      )
      for i in range(len(rows))
    ]
    summed = jax.tree.map(lambda *x: np.sum(x, axis=0), *reports)
    return losses.acceptance(summed) | {
      "hits": (summed["hits"] / summed["rows"]).tolist(),
      "vocabulary_loss": (
        summed["vocabulary"] / summed["vocabulary_rows"]
      ).tolist(),
      "feature_loss": (summed["feature"] / summed["rows"]).tolist(),
    }

  def export(figures: dict) -> None:
    drafters.save(
      out / "drafter",
      config,
      state.params | frozen,
      vocabulary,
      own_head=c.train_head,
      notes={
        "target": name,
        "chat_template": tokenizer.chat_template,
        "trained_steps": int(state.step),
        "trained_tokens": int(state.step) * c.batch_size * T,
        "unroll_steps": c.unroll_steps,
        "heldout": {k: figures[k] for k in ("alpha", "tau")},
      },
      dtype="bfloat16",
    )

  log = (out / "log.jsonl").open("a", buffering=1)

  def write(**row) -> None:
    row["time"] = datetime.datetime.now().isoformat(timespec="seconds")
    log.write(json.dumps(row) + "\n")

  bar = tqdm.tqdm(
    total=total,
    initial=int(state.step),
    unit="step",
    mininterval=1.0 if sys.stderr.isatty() else 60.0,  # a log keeps every line
  )
  began, pending, seen = time.perf_counter(), None, 0
  try:
    for step in range(int(state.step), total):
      batch = batch_of(get_train, next(batches))
      state, report = train_step(state, frozen, target_head, vocabulary, batch)
      seen += batch.tokens.size
      # The report of the step before is fetched while this one runs.
      if pending is not None and step % 10 == 0:
        figures = jax.device_get(pending)
        rate = seen / (time.perf_counter() - began)
        hits = figures["hits"] / np.maximum(figures["rows"], 1)
        write(
          step=step,
          loss=float(figures["loss"]),
          grad_norm=float(figures["grad_norm"]),
          hits=hits.round(4).tolist(),
          tokens_per_s=round(rate, 1),
        )
        bar.set_postfix_str(
          f"loss {figures['loss']:.3f} hits"
          f" {' '.join(f'{h:.2f}' for h in hits)} {rate:.0f} tok/s"
        )
      pending = report
      bar.update()
      last = step + 1 == total
      if (step + 1) % c.eval_every == 0 or last:
        figures = evaluate()
        write(step=step + 1, heldout=figures)
        alphas = " ".join(f"{a:.3f}" for a in figures["alpha"])
        tqdm.tqdm.write(
          f"step {step + 1}: held-out alpha {alphas}, chain tau"
          f" {figures['tau']:.3f}"
        )
        if figures["tau"] > best_tau:
          best_tau = figures["tau"]
          export(figures)
      if (step + 1) % c.save_every == 0 or last:
        manager.save(
          step + 1,
          args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            facts=ocp.args.JsonSave(
              {"best_tau": best_tau, "data": batches.get_state()}
            ),
          ),
        )
  finally:  # also when interrupted: the save under way is completed
    bar.close()
    log.close()
    manager.close()
  return out / "drafter"
