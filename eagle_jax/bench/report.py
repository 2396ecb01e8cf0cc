"""python -m eagle_jax.bench.report --suite FILE --out DIR

Every link of the argument for EAGLE, measured on a target and a drafter of
your own: one self-contained report.html, the same as report.md with its plots
beside it, and the numbers behind every plot in report.json. Needs the report
extra (matplotlib).

With --ablation (drafters trained by configs/ablation_*.py) it compares what a
drafter reads. Answers and finished sections are kept in --out: a run that was
stopped goes on with the same command.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from eagle_jax import choice, generation, loading, machine, script
from eagle_jax.bench import (
  measure,
  page,
  plots,
  replay,
  sections,
  study,
  suites,
)
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import INPUTS, Sampling
from eagle_jax.errors import InputError, check_least
from eagle_jax.files import make_folder, read_kept, write_whole
from eagle_jax.loading import LoadedTarget
from eagle_jax.speculation.requests import check_seed

TITLE = "EAGLE, measured"
UNFINISHED = "UNFINISHED: the run is still going, or was stopped"
PLOTS = "plots"  # folder of the Markdown file's
LEAST = 3  # prompts, for a bootstrap and for held-out folds


def _check(f) -> list[int]:
  """Refuses bad flags; the node budgets, ascending."""
  check_least(f, limit=0, max_new_tokens=16, batch_size=1, speed_limit=1)
  check_seed(f.seed)
  loading.check_dtype(f.dtype)
  try:
    budgets = sorted({int(b) for b in f.budgets})
  except ValueError:
    raise InputError(f"budgets {f.budgets} must be node numbers") from None
  if not budgets or budgets[0] < 3 or budgets[-1] > 500:
    raise InputError(f"budgets {f.budgets} must be from 3 to 500 nodes")
  for tree in f.trees:
    generation.named_tree(tree)
  return budgets


def _finite(value):
  """Not-a-numbers (an interval of too few prompts) as null: JSON has none."""
  if isinstance(value, dict):
    return {k: _finite(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _ablations(
  folders: Sequence[str], target: LoadedTarget, say
) -> dict[str, LoadedDrafter]:
  found: dict[str, LoadedDrafter] = {}
  for folder in folders:
    drafter = loading.load_drafter(folder, target, say)
    label = drafter.config.inputs
    if label in found:
      raise InputError(
        f"ablation {folder!r} reads {label!r}, as another one does: give one"
        " drafter for each input"
      )
    found[label] = drafter
  return {i: found[i] for i in INPUTS if i in found}


def _write(
  out: pathlib.Path,
  head: dict,
  data: dict,
  lines: Sequence[str],
  parts: Sequence[page.Section],
) -> None:
  """The three files and the plots, each replaced as a whole."""
  claims = [
    {"section": x.name, "claim": c.text, "holds": c.holds, "detail": c.detail}
    for x in parts
    for c in x.claims
  ]
  whole = _finite(head | {"claims": claims} | data)
  for file, content in {
    "report.html": page.as_html(TITLE, lines, parts),
    "report.md": page.as_markdown(TITLE, lines, parts, PLOTS),
    "report.json": json.dumps(whole, indent=1, allow_nan=False) + "\n",
  }.items():
    write_whole(out / file, content)
  make_folder(str(out / PLOTS))
  for file, content in page.plot_files(parts).items():
    write_whole(out / PLOTS / file, content)


def _kept(
  file: pathlib.Path, step: sections.Step, s: study.Study
) -> tuple[list[page.Section], dict]:
  """Sections and numbers of a step, from the run before where it had them."""
  if not file.exists():
    numbers: dict = {}
    made = [dataclasses.asdict(part) for part in step(s, numbers)]
    file.parent.mkdir(exist_ok=True)
    write_whole(file, json.dumps({"sections": made, "numbers": numbers}))
  kept = read_kept(file)
  parts = [
    page.Section(**p | {"claims": [page.Claim(**c) for c in p["claims"]]})
    for p in kept["sections"]
  ]
  return parts, kept["numbers"]


def run(f: flags.FlagValues) -> None:
  say = lambda line: print(line, file=sys.stderr, flush=True)
  plots.check()
  budgets = _check(f)
  asked = suites.read_all(f.suite, f.limit)
  for suite, questions in asked.items():
    if len(questions) < LEAST:
      raise InputError(
        f"suite {suite} has {len(questions)} prompts, intervals need {LEAST}:"
        " raise --limit or give more"
      )
  generation.use_compilation_cache()
  target, drafter = loading.load_pair(f.target, f.drafter, f.dtype, say)
  name = f.drafter or loading.DEFAULT_DRAFTER
  ablations = _ablations(f.ablation, target, say)
  out = make_folder(f.out)
  known = {}
  for t in (0.0, *sections.WARM):
    for suite, questions in asked.items():
      say(f"plain answers of {suite} at temperature {t:g}")
      known[suite, t] = replay.plain_answers(
        target,
        questions,
        Sampling(t),
        f.max_new_tokens,
        f.seed,
        f.batch_size,
        out,
      )
  read = study.Study(
    target,
    drafter,
    ablations,
    asked,
    known,
    budgets,
    f.batch_size,
    f.seed,
    f.max_new_tokens,
  )
  facts = machine.facts()
  head = {
    "target": f.target,
    "drafter": name,
    "dtype": target.config.dtype,
    "seed": f.seed,
    "max_new_tokens": f.max_new_tokens,
    "suites": {n: len(q) for n, q in asked.items()},
  }
  lines = [
    f"target {f.target}, drafter {name}, {target.config.dtype}",
    "; ".join(f"{n}: {len(q)} prompts" for n, q in asked.items())
    + f"; at most {f.max_new_tokens} new tokens; seed {f.seed}",
    f"{facts['device']}; {facts['date']}; "
    + ", ".join(f"{p} {v}" for p, v in facts["versions"].items()),
    f"intervals: 95%, {measure.DRAWS} bootstrap draws over prompts; each claim"
    " stands alone, without a correction for their number",
  ]
  decides = {
    "report": head | facts | {"date": None},
    "target": target.fingerprint(),
    "drafters": [
      [choice.drafter_fingerprint(d), d.config.draft_noise]
      for d in (drafter, *ablations.values())
    ],
    "questions": {n: [q.turns for q in qs] for n, qs in asked.items()},
    "flags": [budgets, f.trees, f.speed_limit],
  }
  digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
  data, parts = {}, []
  steps = sections.steps(f.trees, f.speed_limit, say)
  for name, step in steps.items():  # a long run that dies leaves what it has
    say(f"measuring {name}")
    new, numbers = _kept(out / "kept" / f"{name}-{digest}.json", step, read)
    data |= numbers
    parts = sorted([*parts, *new], key=lambda part: part.title)
    _write(out, facts | head, data, [*lines, UNFINISHED], parts)
  _write(out, facts | head, data, lines, parts)
  print(f"written: {out / 'report.html'}; report.md and report.json beside it")


F = flags.FLAGS
flags.DEFINE_multi_string(
  "suite", [], "question.jsonl file; default: the shipped 24 prompts."
)
flags.DEFINE_integer("limit", 0, "First prompts of each suite; 0 = all.")
flags.DEFINE_integer("max_new_tokens", 256, "Of each answer.")
flags.DEFINE_multi_string(
  "ablation", [], "Drafter folders trained with configs/ablation_*.py."
)
flags.DEFINE_list("budgets", ["8", "16", "26", "40", "60"], "Node budgets M.")
flags.DEFINE_list(
  "trees",
  ["chain::3", "static", "dynamic:8:3:4", "dynamic:16:4:4"],
  "Trees whose speed is measured, beside plain and auto.",
)
flags.DEFINE_integer("speed_limit", 8, "Prompts a suite for measured speeds.")
flags.DEFINE_integer("batch_size", 30, "Prompts side by side in replays.")
flags.DEFINE_integer("seed", 0, "Of the sampling noise.")
flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
flags.DEFINE_string("drafter", None, "As in decode.py.")
flags.DEFINE_string("dtype", None, "As in decode.py.")
flags.DEFINE_string("out", "report_out", "Folder of the report.")

if __name__ == "__main__":
  script.run("report", run)
