"""python -m eagle_jax.bench --suite FILE --methods plain,dynamic --out DIR"""

import json
import sys
from collections.abc import Sequence

import tqdm
from absl import flags

from eagle_jax import choice, generation, loading, machine, script
from eagle_jax.bench import measure, peer, suites
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.files import make_folder, write_whole
from eagle_jax.generation import Generator
from eagle_jax.speculation.requests import Request, check_seed
from eagle_jax.speculation.tree import TreeSpec

F = flags.FLAGS
METHODS = (
  *("plain", "chain", "static", "uniform", "dynamic", "auto"),
  "transformers",
)
flags.DEFINE_multi_string(
  "suite", [], "question.jsonl file; default: the shipped 24 prompts."
)
flags.DEFINE_list(
  "methods",
  ["plain", "chain", "dynamic"],
  f"Of {', '.join(METHODS)}, or trees as kind:nodes:levels:branch.",
)
flags.DEFINE_integer("limit", 0, "First prompts of each suite; 0 = all.")
flags.DEFINE_integer("turns", 0, "Turns asked of each prompt; 0 = all.")
flags.DEFINE_integer("max_new_tokens", 256, "Of each answer.")
flags.DEFINE_float("temperature", 0.0, "0 = greedy.")
flags.DEFINE_float("top_p", 1.0, "Keep this much probability; 1 = off.")
flags.DEFINE_string("out", "bench_out", "Folder of bench.md and bench.json.")
flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
flags.DEFINE_string("drafter", None, "As in decode.py.")
flags.DEFINE_integer("drafter_window", None, "As in decode.py.")
flags.DEFINE_integer("seed", 0, "Of the sampling noise.")
flags.DEFINE_float("draft_noise", None, "As in decode.py.")
flags.DEFINE_string("dtype", None, "As in decode.py.")


def table(figures: dict) -> str:
  """The figures as Markdown, a suite and a method a row."""
  lines = [
    "| suite | method | tau | without loops | tokens/s | ratio to plain"
    " | 95% | accepted by depth | diverged |",
    "|---|---|---:|---:|---:|---:|---|---|---:|",
  ]
  number = lambda x, digits=2: "" if x is None else f"{x:.{digits}f}"
  for suite, methods in figures["suites"].items():
    for name, f in methods.items():
      span = (
        f"{f['ratio_low']:.2f}-{f['ratio_high']:.2f}"
        if "ratio_low" in f
        else ""
      )
      depth = " ".join(f"{a:.2f}" for a in f["accept_by_depth"])
      lines.append(
        f"| {suite} | {name} | {number(f['tau'])} |"
        f" {number(f['tau_without_loops'])} | {f['tokens_per_s']:.1f} |"
        f" {number(f.get('ratio_to_plain'))} | {span} | {depth} |"
        f" {f['diverged']} |"
      )
    if "transformers" in methods and "plain" in methods:
      value, low, high = figures["plain_to_transformers"][suite]
      lines.append(
        f"| {suite} | plain / transformers | | | | {value:.2f} |"
        f" {low:.2f}-{high:.2f} | | |"
      )
  lines += _by_context(figures["suites"])
  notes = [
    f"{suite}: {n} later turn{'s' if n > 1 else ''} did not fit the context"
    " and were left out."
    for suite, n in figures["turns_left_out"].items()
    if n
  ]
  return "\n".join(lines + (["", *notes] if notes else []))


def _by_context(suites: dict) -> list[str]:
  """tau by the tokens that a cycle began with; nothing for a single band."""
  found = {
    (suite, name): f["tau_by_context"]
    for suite, methods in suites.items()
    for name, f in methods.items()
    if len(f["tau_by_context"]) > 1
  }
  used = [
    str(e) for e in measure.EDGES if any(str(e) in f for f in found.values())
  ]
  if not used:
    return []
  head = ["suite", "method", *(f"tau from {edge} tokens" for edge in used)]
  lines = ["", f"| {' | '.join(head)} |", "|---|---|" + "---:|" * len(used)]
  for (suite, name), by in found.items():
    cells = [f"{by[e]['tau']:.2f}" if e in by else "" for e in used]
    lines.append(f"| {' | '.join([suite, name, *cells])} |")
  return lines


def _specs(methods: Sequence[str]) -> dict[str, TreeSpec | None]:
  """Method -> tree; None for plain, transformers, and for auto, which is
  chosen once the models are loaded."""
  if not methods:
    raise InputError(f"no methods: use some of {', '.join(METHODS)}")
  specs = {}
  for name in methods:
    if ":" not in name and name not in METHODS:
      raise InputError(
        f"method {name!r} is unknown: use some of {', '.join(METHODS)}"
      )
    treeless = name in ("plain", "transformers", "auto")
    specs[name] = None if treeless else generation.named_tree(name)
  return specs


def run(F: flags.FlagValues) -> None:
  for name, least, rule in (
    ("limit", 0, "0 (all) or more"),
    ("turns", 0, "0 (all) or more"),
    ("max_new_tokens", 1, "at least 1"),
  ):
    if F[name].value < least:
      raise InputError(f"{name} {F[name].value} must be {rule}")
  check_seed(F.seed)
  loading.check_dtype(F.dtype)
  loading.check_window(F.drafter_window)
  sampling = Sampling(F.temperature, top_p=F.top_p, draft_noise=F.draft_noise)
  asked = suites.read_all(F.suite, F.limit)
  specs = _specs(F.methods)

  say = lambda line: print(line, file=sys.stderr, flush=True)
  generation.use_compilation_cache()
  drafted = set(F.methods) - {"plain", "transformers"}
  method = "eagle" if drafted else "plain"
  target, drafter = loading.load_for(
    method, F.target, F.drafter, F.dtype, say, F.drafter_window
  )
  if "auto" in specs:
    specs["auto"] = choice.spec(target, drafter, 1, sampling, say, verbose=True)
  generators = {
    name: Generator(target, drafter, "eagle" if spec else "plain", spec)
    for name, spec in specs.items()
    if name != "transformers"
  }
  if not generators:
    raise InputError(
      "methods 'transformers' alone measures no EAGLE: add plain"
    )
  methods = {
    name: peer.Transformers(target, say)
    if name == "transformers"
    else generators[name]
    for name in specs
  }
  out = make_folder(F.out)
  figures = machine.facts() | {
    "target": F.target,
    "drafter": (F.drafter or loading.DEFAULT_DRAFTER) if drafter else None,
    "drafter_window": F.drafter_window,
    "dtype": target.config.dtype,
    "seed": F.seed,
    "temperature": F.temperature,
    "top_p": F.top_p,
    "draft_noise": sampling.strength(drafter.config.draft_noise)
    if drafter
    else None,
    "max_new_tokens": F.max_new_tokens,
    "trees": {
      n: {"nodes": s.num_nodes, "levels": s.levels, "branch": s.branch}
      for n, s in specs.items()
      if s
    },
    "suites": {},
    "turns_left_out": {},
    "plain_to_transformers": {},
  }

  def write() -> None:
    """After every suite, so that a long run that dies leaves what it has."""
    for name, content in {
      "bench.json": json.dumps(figures, indent=1),
      "bench.md": table(figures),
    }.items():
      write_whole(out / name, content + "\n")

  for name, questions in asked.items():
    # Warm up: compiles what the longest prompt needs and touches all weights.
    longest = max(questions, key=lambda q: sum(map(len, q.turns)))
    ids = next(iter(generators.values())).encode(longest.turns[0])
    warm = Request(ids, F.max_new_tokens, sampling, F.seed)
    for method in methods.values():
      method.run([warm], [""])
    asks = sum(len(q.turns[: F.turns or None]) for q in questions)
    with tqdm.tqdm(total=asks * len(methods), unit="answer") as bar:

      def progress(method, index, bar=bar, name=name):
        bar.set_description(f"{name} {index + 1} {method}", refresh=False)
        bar.update()

      rows, left_out = measure.run(
        methods,
        next(iter(generators.values())),
        questions,
        sampling,
        F.max_new_tokens,
        F.seed,
        F.turns,
        progress,
      )
    figures["suites"][name] = measure.summary(rows)
    figures["turns_left_out"][name] = left_out
    if "transformers" in rows and "plain" in rows:
      figures["plain_to_transformers"][name] = measure.ratio(
        rows["transformers"], rows["plain"]
      )
    write()
  print(table(figures))
  say(f"written: {out / 'bench.md'}, {out / 'bench.json'}")


if __name__ == "__main__":
  script.run("bench", run)
