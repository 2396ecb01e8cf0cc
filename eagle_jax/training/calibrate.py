"""python -m eagle_jax.training.calibrate --drafter DIR --data heldout.jsonl

How strongly should drafting use the noise that the target will draw with? On
held-out chats: the target's own token at each position (its logits plus the
noise) against the drafter's best children at several strengths. The strength
with the most hits among `branch` children is written to the drafter's
config.json, the whole curve beside it.

What each tree is worth in tokens a pass, on answers of the target to prompts of
that data, greedy ones and ones drawn at the temperature, goes to
acceptance.json beside it: `--tree auto` then need not estimate it.
"""

import functools
import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from eagle_jax import choice, loading, script
from eagle_jax.checkpoints import hf_target
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.files import write_whole
from eagle_jax.loading import LoadedTarget
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.speculation.sampling import gumbel, row_seed
from eagle_jax.training import batches, dataset, losses

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
WIDTHS = (1, 4, 10)
LENGTH = 128  # of the answers that are drawn to see what trees are worth


def curve(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  packed: dict[str, np.ndarray],
  temperature: float,
  seed: int,
) -> dict[str, list[float]]:
  """Share of first-level drafts that hold the target's token.

  Args:
    packed: rows as `data.Packed.take` gives them.

  Returns:
    strength -> hits among the best 1, 4 and 10 children.
  """
  module = Drafter(drafter.config)
  network = Target(target.config, drafter.config.taps)
  vocabulary = jnp.asarray(drafter.vocabulary)
  V = target.config.vocab_size

  @jax.jit
  def hits(target_params, params, tokens, mask, documents, positions, key):
    fused, final = losses.target_features(
      network, target_params, tokens, documents, positions
    )
    batch = losses.Batch(tokens, mask, documents, positions, fused, final)
    out = losses.unroll(module, params, batch, 1, None, False)[0]
    draft = module.apply({"params": params}, out, method="logits")[0]
    logits = network.apply(
      {"params": target_params}, losses.shift(final, 1)[0], method="logits"
    )
    T = tokens.shape[1]
    noise = gumbel(jnp.broadcast_to(key, (T, 2)), positions[0] + 2, V)
    wanted = jnp.argmax(logits / temperature + noise, axis=-1)
    rows = losses.counted(batch, 0)[0]
    found = []
    for strength in STRENGTHS:
      keys = draft / temperature + strength * noise[:, vocabulary]
      best = vocabulary[jax.lax.top_k(keys, max(WIDTHS))[1]]
      same = (best == wanted[:, None]) & rows[:, None]
      found.append([jnp.sum(same[:, :k]) for k in WIDTHS])
    return jnp.array(found), jnp.sum(rows)

  total, count = np.zeros((len(STRENGTHS), len(WIDTHS))), 0
  run = functools.partial(hits, target.params, drafter.params)
  for r in range(len(packed["row"])):
    row = slice(r, r + 1)
    found, rows = run(
      *(packed[name][row] for name in batches.FIELDS),
      row_seed(seed, r, 0),
    )
    total += np.asarray(found)
    count += int(rows)
  if not count:
    raise InputError("no row of the data has two answer tokens in a row")
  return {
    str(s): (total[i] / count).round(4).tolist()
    for i, s in enumerate(STRENGTHS)
  }


def prompts_of(packed: dict[str, np.ndarray], most: int) -> list[list[int]]:
  """Ids before the first answer of each document, `most` of them at most.

  Args:
    packed: rows as `data.Packed.take` gives them.
  """
  found = []
  for tokens, mask, documents in zip(
    *(packed[n] for n in ("tokens", "mask", "documents")), strict=True
  ):
    for d in np.unique(documents[documents > 0]):
      inside = documents == d
      if mask[inside].any():
        found.append(tokens[inside][: mask[inside].argmax()].tolist())
  return [p for p in found if p][:most]


def best(measured: dict[str, list[float]], width: int) -> float:
  """The strength with the most hits among `width` children."""
  return float(max(measured, key=lambda s: measured[s][WIDTHS.index(width)]))


def write(folder: pathlib.Path, strength: float, notes: dict) -> None:
  """Put the strength into a drafter's config.json."""
  file = folder / "config.json"
  raw = json.loads(file.read_text())
  raw["eagle_jax"] |= {"draft_noise": strength, "calibration": notes}
  write_whole(file, json.dumps(raw, indent=1) + "\n")


def _run(f) -> None:
  say = lambda line: print(line, file=sys.stderr, flush=True)
  if not f.data or not f.drafter:
    raise InputError("--drafter and --data are needed: a folder, and chats")
  if f.temperature <= 0 or min(f.rows, f.answers) < 1:
    raise InputError(
      f"temperature {f.temperature:g} must be above 0, rows {f.rows} and"
      f" answers {f.answers} at least 1"
    )
  if f.width not in WIDTHS:
    raise InputError(f"width {f.width} must be one of {WIDTHS}")
  folder = pathlib.Path(f.drafter)
  if "eagle_jax" not in hf_target.read_config(folder):
    raise InputError(
      f"{folder}/config.json was not written by this project: export the"
      " drafter with it first"
    )
  target = loading.load_target(f.target, loading.default_dtype(), say)
  drafter = loading.load_drafter(f.drafter, target, say)
  W = drafter.config.draft_vocab_size
  if max(WIDTHS) > W:
    raise InputError(
      f"drafter {f.drafter!r} has a draft vocabulary of {W} ids: calibration"
      f" looks at the best {max(WIDTHS)}"
    )
  with tempfile.TemporaryDirectory() as kept:
    corpus = dataset.prepare(
      [f.data], target.tokenizer, pathlib.Path(kept), f.max_bad_rows
    )
    whole = corpus.pack(f.row_length, len(corpus.lengths), "cut", 0)
    # Packing sorts by length: take rows of all lengths.
    rows = np.random.default_rng(0).permutation(len(whole))[: f.rows]
    packed = whole.take(rows)
  measured = curve(target, drafter, packed, f.temperature, f.seed)
  print(f"{'strength':>8}" + "".join(f"  first {k:<3}" for k in WIDTHS))
  for strength, hits in measured.items():
    print(f"{strength:>8}" + "".join(f"  {h:<9.3f}" for h in hits))
  chosen = best(measured, f.width)
  prompts = prompts_of(packed, f.answers)
  seen, warm = (
    choice.estimate(target, drafter, sampling, prompts, LENGTH)
    for sampling in (Sampling(), Sampling(f.temperature, draft_noise=chosen))
  )
  if not len(seen.rank):
    raise InputError(
      f"target {f.target!r}: no greedy answer of {len(prompts)} is long enough"
      " to tell the worth of trees, so nothing was written"
    )
  write(
    folder,
    chosen,
    {"temperature": f.temperature, "hits_of": list(WIDTHS), "hits": measured},
  )
  print(f"draft_noise {chosen} written to {f.drafter}/config.json")
  choice.save_acceptance(folder, drafter, seen, f.temperature, chosen, warm)
  print(
    f"acceptance of {len(seen.rank)} greedy and {len(warm.rank)} drawn contexts"
    " written beside it"
  )


if __name__ == "__main__":
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
  flags.DEFINE_string("drafter", None, "Drafter folder; its config is written.")
  flags.DEFINE_string("data", None, "Held-out chats, JSONL.")
  flags.DEFINE_float("temperature", 1.0, "At which to calibrate.")
  flags.DEFINE_integer("max_bad_rows", 0, "Most rows that may be dropped.")
  flags.DEFINE_integer("rows", 16, "Packed rows to use.")
  flags.DEFINE_integer("row_length", 512, "Tokens of a packed row.")
  flags.DEFINE_integer("width", 4, "Children that count, 1, 4 or 10.")
  flags.DEFINE_integer(
    "answers", 24, "To prompts of the data, to see what trees are worth."
  )
  flags.DEFINE_integer("seed", 0, "Of the noise.")
  script.run("calibrate", _run)
