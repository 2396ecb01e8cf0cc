"""The report's last section: tokens a second, and where the time goes."""

import dataclasses
from collections.abc import Sequence

from eagle_jax import choice, costs, drawing, generation, text
from eagle_jax.bench import measure, overhead, plots, replay
from eagle_jax.bench.measure import Row
from eagle_jax.bench.page import Claim, Section
from eagle_jax.bench.study import Study, sign
from eagle_jax.choice import Choice
from eagle_jax.config import Sampling
from eagle_jax.costs import Costs
from eagle_jax.generation import Generator
from eagle_jax.speculation.tree import TreeSpec

OVERHEAD = 0.1  # of a cycle, beside the two networks, that is still well


@dataclasses.dataclass(frozen=True)
class Measured:
  """What was timed.

  choice: of --tree auto; None where nothing is known of the acceptance.
  auto: the name of its method. specs: tree of each EAGLE method. parts: costs
  of passes alone. rows: answers of each method. figures: their summary, with
  cycle_ms, and for trees that `parts` covers draft_ms and verify_ms, alone.
  overhead: of the tree of --tree auto, see `overhead.of_answers`.
  """

  choice: Choice | None
  auto: str
  specs: dict[str, TreeSpec]
  parts: Costs
  rows: dict[str, list[Row]]
  figures: dict[str, dict]
  overhead: dict | None

  @property
  def best_fixed(self) -> str | None:
    """The fastest tree that --tree auto did not name."""
    rate = lambda name: self.figures[name]["tokens_per_s"]
    return max(
      (n for n in self.specs if n != self.auto), key=rate, default=None
    )


def _answers(
  s: Study, methods: dict[str, Generator], limit: int
) -> dict[str, list[Row]]:
  """Methods in turn on the first prompts of each suite, numbered through."""
  rows: dict[str, list[Row]] = {n: [] for n in methods}
  for questions in s.asked.values():
    few = questions[:limit]
    longest = max(few, key=lambda q: len(q.turns[0]))
    for method in methods.values():  # compile, touch all weights
      method.generate([longest.turns[0]], max_new_tokens=s.max_new_tokens)
    found, _ = measure.run(
      methods,
      methods["plain"],
      few,
      Sampling(),
      s.max_new_tokens,
      s.seed,
      1,
      lambda name, i: None,
    )
    base = max((r.question for r in rows["plain"]), default=-1) + 1
    for n, mine in found.items():
      rows[n] += [
        dataclasses.replace(r, question=r.question + base) for r in mine
      ]
  return rows


def _figures(
  rows: dict[str, list[Row]], specs: dict[str, TreeSpec], parts: Costs
) -> dict[str, dict]:
  figures = measure.summary(rows)
  for name, f in figures.items():
    cycle = sum(r.decode_seconds for r in rows[name]) / f["cycles"]
    f["cycle_ms"] = cycle * 1e3
    spec = specs.get(name)
    if spec and spec.num_nodes <= max(parts.verify):
      f["draft_ms"] = parts.drafting(spec) * 1e3
      f["verify_ms"] = parts.verifying(spec.num_nodes, f["tau"]) * 1e3
  return figures


def _claims(m: Measured) -> list[Claim]:
  diverged = sum(f["diverged"] for f in m.figures.values())
  claims = [
    Claim(
      "Every method gives plain decoding's tokens.",
      diverged == 0,
      f"{diverged} answers differ beyond rounding ties",
    )
  ]
  if not m.choice:
    return claims
  auto = m.figures[m.auto]
  low, high = auto["ratio_low"], auto["ratio_high"]
  claims.append(
    Claim(
      "--tree auto is faster than plain decoding.",
      sign({"low": low - 1, "high": high - 1}),
      f"{auto['ratio_to_plain']:.2f} times, 95% {low:.2f} to {high:.2f}",
    )
  )
  best = m.best_fixed
  if best:
    value, low, high = measure.ratio(m.rows[best], m.rows[m.auto])
    claims.append(
      Claim(
        "--tree auto is within 5% of the best fixed tree measured here.",
        sign({"low": low - 0.95, "high": high - 0.95}),
        f"{value:.2f} of {best}, 95% {low:.2f} to {high:.2f}",
      )
    )
  if not m.overhead:
    return claims
  o, within = m.overhead, m.overhead["overhead"]
  claims.append(
    Claim(
      f"A cycle spends under {OVERHEAD:.0%} beside its two networks.",
      sign(
        {"low": OVERHEAD - within["high"], "high": OVERHEAD - within["low"]}
      ),
      f"{within['value']:.1%}, 95% {within['low']:.1%} to"
      f" {within['high']:.1%}: cycles of"
      f" {o['cycle_ms']:.1f} ms with --tree auto, their networks alone"
      f" {o['networks_ms']:.1f} ms, {o['answers']} answers in turn",
    )
  )
  return claims


def _tables(m: Measured) -> list[tuple]:
  alone = lambda f, part: f"{f[part]:.1f}" if part in f else ""
  rows = [
    (
      n,
      "" if f["tau"] is None else f"{f['tau']:.2f}",
      f"{f['tokens_per_s']:.1f}",
      f"{f['ratio_to_plain']:.2f} ({f['ratio_low']:.2f}–{f['ratio_high']:.2f})",
      f"{f['cycle_ms']:.1f}",
      *(alone(f, part) for part in ("draft_ms", "verify_ms")),
    )
    for n, f in m.figures.items()
  ]
  verify = m.parts.verify
  tables = [
    (
      (
        *("method", "tau", "tokens/s", "ratio to plain (95%)", "cycle, ms"),
        *("drafting alone, ms", "verifying alone, ms"),
      ),
      rows,
    ),
    (
      ("M", "verify(M), ms", "in plain passes"),
      [
        (M, f"{t * 1e3:.2f}", f"{t / verify[1]:.2f}") for M, t in verify.items()
      ],
    ),
  ]
  if m.choice:
    auto = m.figures[m.auto]
    tables.append(
      (
        ("--tree auto", "expected", "measured"),
        [
          ("tau", f"{m.choice.tau:.2f}", f"{auto['tau']:.2f}"),
          (
            "tokens/s",
            f"{m.choice.tokens_per_s:.1f} (prefill left out)",
            f"{auto['tokens_per_s']:.1f} (prefill counted)",
          ),
        ],
      )
    )
  return tables


def _as_json(c: Costs) -> dict:
  """JSON has texts for keys."""
  as_text = lambda table: {str(k): v for k, v in table.items()}
  return {
    k: as_text(v) if isinstance(v, dict) else v
    for k, v in dataclasses.asdict(c).items()
  }


def _drawn(s: Study, generator: Generator) -> str:
  """The draft tree with the longest accepted path of one answer."""
  question = next(iter(s.asked.values()))[0]
  seen = []
  request = replay.first_turn(
    s.target, question, Sampling(), min(s.max_new_tokens, 64), s.seed
  )
  generator.run(
    [request],
    [""],
    watch_trees=lambda tree, out: seen.append(drawing.of_cycle(tree, out)),
  )
  if not seen:
    return ""
  best = max(seen, key=lambda d: len(d.given))
  nodes = generator.models.spec.num_nodes
  head = f"A draft tree of {nodes} nodes; * marks the accepted path"
  return f"{head}\n\n{drawing.tree(best, text.piece(s.target.tokenizer))}"


def section(
  s: Study, names: Sequence[str], limit: int, data: dict, say
) -> Section:
  """Plain decoding, the named trees and --tree auto on the same prompts.

  Args:
    names: trees as kind:nodes:levels:branch. limit: prompts a suite.
  """
  made = choice.choose(s.target, s.drafter, 1, Sampling(), say)
  specs = {n: generation.named_tree(n) for n in names}
  auto = ""
  if made:
    auto = f"auto ({made.tree})"
    specs[auto] = generation.named_tree(made.tree)
  say("timing verify and draft passes")
  # timed anew and for all M: what `choose` keeps ends where trees cannot pay
  parts = costs.measure(
    s.target,
    s.drafter,
    1,
    choice.NODES,
    choice.branches(s.drafter),
    float("inf"),
    0.0,
    0.0,
  )
  methods = {"plain": Generator(s.target, None, "plain")}
  for name, spec in specs.items():
    methods[name] = Generator(s.target, s.drafter, "eagle", spec)
  say(f"timing {len(methods)} methods")
  rows = _answers(s, methods, limit)
  figures = _figures(rows, specs, parts)
  beside = None
  if made:
    say("timing the networks of a cycle alone")
    first = [q for qs in s.asked.values() for q in qs[:limit]]
    data["overhead"] = beside = overhead.of_answers(
      methods[auto].engine,
      [
        replay.first_turn(s.target, q, Sampling(), s.max_new_tokens, s.seed)
        for q in first
      ],
    )
  m = Measured(made, auto, specs, parts, rows, figures, beside)
  count = len(rows["plain"])
  data["speed"] = {"methods": m.figures, "prompts": count}
  data["costs"] = _as_json(parts)
  data["auto"] = made and dataclasses.asdict(made) | {
    "costs": _as_json(made.costs),
    "measured_tokens_per_s": m.figures[auto]["tokens_per_s"],
    "measured_tau": m.figures[auto]["tau"],
  }
  return Section(
    "speed",
    "g. Tokens a second, and where the time goes",
    "Methods answer the same prompts in turn. verify(M) is one target pass over"
    " M nodes. Drafting and verifying are timed alone, which takes longer than"
    " inside a cycle; what a cycle spends beside its two networks is therefore"
    " measured with a loop of those networks, in turn with answers.",
    _claims(m),
    [plots.speed(m.figures, data["costs"])],
    _tables(m),
    f"n = {count} prompts, first turns, temperature 0, at most"
    f" {s.max_new_tokens} new tokens.",
    _drawn(s, methods[max(specs, key=lambda n: specs[n].num_nodes)]),
  )
