"""The report's sections: what each link of the argument shows.

Each takes a `Study`, puts its numbers into `data` and returns a `Section`
whose claims say plainly whether the argument holds.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from eagle_jax import generation
from eagle_jax.bench import evidence, measure, plots, speed
from eagle_jax.bench.measure import Row
from eagle_jax.bench.page import Claim, Section
from eagle_jax.bench.replay import Drafting
from eagle_jax.bench.study import Study, above, ordered, sign, span
from eagle_jax.config import INPUTS
from eagle_jax.training import acceptance, calibrate

WARM = (0.7, 1.0)  # temperatures at which shared noise is measured


def _entropy(s: Study, reads, data: dict) -> Section:
  data["entropy"] = e = evidence.entropy(reads)
  rows = [
    (
      n,
      c["prompts"],
      c["bits"]["n"],
      span(c["bits"]),
      f"{c['choices_of_mean']:.2f}",
      f"{c['mean_choices']:.2f}",
      f"{c['above_1_bit']:.0%}",
    )
    for n, c in [*e["by_category"].items(), ("all", e)]
  ]
  bits = e["bits"]
  return Section(
    "entropy",
    "a. A token is a random draw",
    "A drafter that predicts the next token guesses a draw: H bits of entropy"
    " are 2^H equally likely choices. Entropy of the target's distribution"
    " (temperature 1) at every position of its own greedy answers.",
    [
      Claim(
        "The next token is a draw, not a certainty.",
        bits["low"] > 0.1,
        f"mean {span(bits)} bits; {e['above_1_bit']:.0%} of positions have"
        " more than one bit",
      )
    ],
    [plots.entropy(e)],
    [
      (
        (
          "category",
          "prompts",
          "positions",
          "bits (95%)",
          "2^mean",
          "mean of 2^H",
          "above 1 bit",
        ),
        rows,
      )
    ],
    f"n = {bits['n']} positions of {e['prompts']} answers; bits.",
  )


def _features(s: Study, reads, data: dict) -> Section:
  table = np.asarray(s.target.params["embed_tokens"]["embedding"], np.float32)
  data["smoothness"] = smooth = evidence.smoothness(reads, table, s.seed)
  data["explained"] = r2 = evidence.explained(reads, table, s.seed)
  one = next(iter(r2.values()))
  names = evidence.INPUT_NAMES
  order = ("feature", "feature+unshifted", "feature+token")
  alone, wrong, right = (r2[n] for n in order)
  gap = {
    n: smooth[n]["neighbours"]["value"] - smooth[n]["apart"]["value"]
    for n in ("feature", "embedding")
  }
  return Section(
    "features",
    "b. A feature is computed, given the draw",
    "The next feature is a function of this one and of the token that was"
    " drawn. Left: how alike neighbours along an answer are. Right: how much of"
    " the next feature a linear (ridge) regression explains on held-out"
    " prompts, by what it reads.",
    [
      Claim(
        "Features run smoother along a sequence than token embeddings.",
        sign(smooth["difference"]),
        "cosine of neighbours less that of positions apart: features"
        f" {gap['feature']:+.3f}, embeddings {gap['embedding']:+.3f},"
        f" difference {span(smooth['difference'], digits=3)}",
      ),
      Claim(
        "The drawn token explains more of the next feature than the feature"
        " alone or with the token before the draw.",
        True
        if right["low"] > max(alone["high"], wrong["high"])
        else False
        if right["high"] < max(alone["low"], wrong["low"])
        else None,
        f"R² {span(right, 'r2')} against {span(alone, 'r2')} and"
        f" {span(wrong, 'r2')}",
      ),
    ],
    [plots.smoothness(smooth, r2, names)],
    [
      (
        ("along answers", "cosine of neighbours (95%)", "apart (95%)"),
        [
          (n, span(smooth[n]["neighbours"]), span(smooth[n]["apart"]))
          for n in gap
        ],
      ),
      (
        ("reads", "held-out R² (95%)"),
        [(names[n], span(v, "r2", 3)) for n, v in r2.items()],
      ),
    ],
    f"n = {one['rows']} positions of {one['prompts']} answers for R²,"
    f" {min(evidence.FOLDS, one['prompts'])} folds over prompts; seed {s.seed};"
    f" {smooth['feature']['neighbours']['n']} pairs for cosines.",
  )


def _middle(s: Study) -> int:
  """EAGLE-1's 26 nodes, or the budget in the middle."""
  return 26 if 26 in s.budgets else s.budgets[len(s.budgets) // 2]


def _trees(s: Study, data: dict) -> tuple[Section, Section]:
  """Sections c and e: one replay serves both."""
  kinds: dict[str, dict[int, str]] = {
    "dynamic": {M: s.dynamic(M, s.drafter) for M in s.budgets},
    "uniform, branch 2": {M: f"uniform:{M}::2" for M in s.budgets},
    "uniform, branch 3": {M: f"uniform:{M}::3" for M in s.budgets},
    "static (EAGLE-1)": {26: "static"},
    "chain of 5": {6: "chain::5"},
  }
  names = sorted({n for k in kinds.values() for n in k.values()})
  specs = {n: generation.named_tree(n) for n in names}
  rows = s.replayed(
    s.all_known(0.0), {n: Drafting(s.drafter, t) for n, t in specs.items()}
  )
  figures = {n: evidence.tree_figures(rows[n], specs[n]) for n in names}
  return _accept_chain(s, figures, data), _budget(s, kinds, rows, figures, data)


def geometric(chains: dict[str, dict]) -> list[Claim]:
  """Is every step within .05 of one p: for the chain, and for all trees?"""
  claims = []
  trees = {n: c for n, c in chains.items() if n != "chain::5"}
  for what, some in (
    ("A chain", {"chain::5": chains["chain::5"]}),
    ("A tree", trees),
  ):
    off = {n: max(c["gap"], key=abs, default=0.0) for n, c in some.items()}
    far = max(off, key=lambda n: abs(off[n]))
    step = some[far]["gap"].index(off[far]) + 1 if some[far]["gap"] else 0
    claims.append(
      Claim(
        f"{what} is accepted with one chance at every step (within .05).",
        abs(off[far]) <= 0.05,
        f"largest gap {off[far]:+.3f}, {far} at step {step}",
      )
    )
  return claims


def _accept_chain(s: Study, figures: dict[str, dict], data: dict) -> Section:
  M = _middle(s)
  shown = ("chain::5", "static", f"uniform:{M}::3", s.dynamic(M, s.drafter))
  data["accept_chain"] = chains = {
    n: evidence.accept_chain(figures[n]) for n in shown
  }
  one = chains["chain::5"]
  return Section(
    "accept_chain",
    "c. Tokens a pass follow the accept chain",
    "If every step were accepted with the same chance p, tokens a pass would be"
    " E = 1 / (1 - p). Beside the implied p = 1 - 1/E stands what each step"
    " really did, given that all before it were accepted; cut p is the same"
    " for drafts that end after L levels. A tree offers its first steps more"
    " candidates than its later ones, so that its steps fall off.",
    geometric(chains),
    [plots.accept_chain(chains)],
    [
      (
        ("tree", "tau", "implied p", "cut p", "accepted by step"),
        [
          (
            n,
            f"{c['tau']:.2f}",
            f"{c['implied_p']:.3f}",
            f"{c['cut_p']:.3f}",
            " ".join(f"{a:.2f}" for a in c["measured"]),
          )
          for n, c in chains.items()
        ],
      )
    ],
    f"n = {s.prompts} answers at temperature 0; chain of 5: tau"
    f" {one['tau']:.2f}. Late steps are reached rarely.",
  )


def _budget_claims(
  s: Study, kinds: dict[str, dict[int, str]], rows: dict[str, list[Row]]
) -> list[Claim]:
  claims = []
  for M in s.budgets:
    uniform = max(
      (kinds["uniform, branch 2"][M], kinds["uniform, branch 3"][M]),
      key=lambda n: measure.tau(rows[n]),
    )
    dynamic = kinds["dynamic"][M]
    claim = lambda better, worse, text: ordered(
      rows[better], rows[worse], text, f"{better} less {worse}"
    )
    if M == 26:
      claims += [
        claim(dynamic, "static", "Dynamic ≥ static at 26 nodes."),
        claim("static", uniform, "Static ≥ uniform at 26 nodes."),
      ]
    claims.append(claim(dynamic, uniform, f"Dynamic ≥ uniform at {M} nodes."))
  return claims


def _budget(
  s: Study,
  kinds: dict[str, dict[int, str]],
  rows: dict[str, list[Row]],
  figures: dict[str, dict],
  data: dict,
) -> Section:
  known = s.all_known(0.0)
  data["trees"] = {
    kind: [{"tree": n} | figures[n] for n in names.values()]
    for kind, names in kinds.items()
  }
  seen = acceptance.of_answers(
    s.target,
    s.drafter,
    [r.prompt_ids for r in known.requests],
    known.answers,
  )
  data["acceptance_by_rank"] = by_rank = seen.by_rank().tolist()
  data["estimated_tau"] = estimated = (
    acceptance.tokens_a_pass(seen) if len(seen.rank) else {}
  )
  every = [
    (
      kind,
      e["tree"],
      e["nodes"],
      span(e, "tau"),
      f"{estimated[e['tree']]:.2f}" if e["tree"] in estimated else "",
      f"{e['mean_accepted']:.2f}",
      e["deepest_accepted"],
    )
    for kind, entries in data["trees"].items()
    for e in entries
  ]
  return Section(
    "trees",
    "e. A tree spends a node budget",
    "A uniform tree spends its nodes blindly, EAGLE-1's static tree by"
    " experience, a dynamic tree (EAGLE-2) where the drafter is confident."
    " Trees are replayed along known answers; uniform counts with the better"
    " of two branch widths.",
    _budget_claims(s, kinds, rows),
    [plots.trees(data["trees"])],
    [
      (
        (
          *("kind", "tree", "M", "tau (95%)", "estimated"),
          *("mean accepted", "deepest"),
        ),
        every,
      ),
      (
        ("level", *(f"child {r + 1}" for r in range(len(by_rank[0])))),
        [
          (level + 1, *(f"{share:.3f}" for share in shares))
          for level, shares in enumerate(by_rank)
        ],
      ),
    ],
    f"n = {s.prompts} answers at temperature 0;"
    f" {figures['chain::5']['cycles']} passes of the chain."
    " Trees are kind:M:L:branch. Estimated: what --tree auto would expect,"
    f" from the children of {len(seen.rank)} contexts; below, how often the"
    " target's token was each of them, on the true path.",
  )


def _inputs(s: Study, data: dict) -> Section:
  section = Section(
    "inputs",
    "d. What the drafter should read",
    "Four drafters of one size, trained alike, that differ in what they read:"
    " the feature and the token drawn after it (EAGLE), the feature and its own"
    " token, the feature alone, or the token alone (an independent draft model:"
    " it never sees the target's state).",
    [],
    [],
    [],
    f"n = {s.prompts} answers at temperature 0, replayed.",
  )
  data["inputs"] = figures = {}
  data["inputs_by_suite"] = by_suite = {}
  if not s.ablations:
    section.caption = (
      "Not measured: no --ablation drafters were given. Train them with"
      " configs/ablation_*.py and name each with --ablation FOLDER."
    )
    return section
  narrow = min(s.ablations.values(), key=lambda d: d.config.draft_vocab_size)
  trees = {
    n: generation.named_tree(n)
    for n in ("chain::5", s.dynamic(_middle(s), narrow))
  }
  rows = s.replayed(
    s.all_known(0.0),
    {
      (label, n): Drafting(drafter, spec)
      for label, drafter in s.ablations.items()
      for n, spec in trees.items()
    },
  )
  for (label, n), mine in rows.items():
    found = evidence.tree_figures(mine, trees[n])
    figures.setdefault(label, {})[n] = found
  right = INPUTS[0] if INPUTS[0] in s.ablations else None
  others = [label for label in s.ablations if right and label != right]
  for label in others:
    named = evidence.INPUT_NAMES[label] + ("" if "+" in label else " alone")
    for n in trees:
      what = "chain" if n == "chain::5" else "tree"
      section.claims.append(
        ordered(
          rows[right, n],
          rows[label, n],
          f"Feature and token beat {named}, {what}.",
          n,
        )
      )
  parts = {key: s.by_suite(mine) for key, mine in rows.items()}
  for suite, (label, n) in itertools.product(s.asked, rows):
    mine = parts[label, n][suite]
    found = measure.interval(measure.tau_interval(mine))
    if label in others:
      found["less_than_right"] = measure.interval(
        measure.tau_difference(mine, parts[right, n][suite])
      )
    by_suite.setdefault(suite, {}).setdefault(label, {})[n] = found
  section.plots = [plots.inputs(figures)]
  section.tables = [
    (
      ("reads", "tree", "tau (95%)", "accepted by step"),
      [
        (
          label,
          n,
          span(f, "tau", 3),
          " ".join(f"{a:.2f}" for a in f["accept_by_depth"]),
        )
        for label, by in figures.items()
        for n, f in by.items()
      ],
    ),
    (
      (
        *("suite", "reads", "tree", "tau (95%)"),
        f"{right or INPUTS[0]} less it (95%)",
      ),
      [
        (
          suite,
          label,
          n,
          span(f),
          span(f["less_than_right"], digits=3) if label in others else "",
        )
        for suite, by_label in by_suite.items()
        for label, by in by_label.items()
        for n, f in by.items()
      ],
    ),
  ]
  return section


def _gains(s: Study, strength: float) -> tuple[dict[str, dict], list[Claim]]:
  """tau with this shared noise and without, of a chain and a middle-sized
  dynamic tree, suite by suite."""
  trees = ("chain::5", s.dynamic(_middle(s), s.drafter))
  gains: dict[str, dict] = {}
  claims = []
  for t in WARM if strength else ():
    for suite in s.asked:
      rows = s.replayed(
        s.known[suite, t],
        {
          (n, noise): Drafting(s.drafter, generation.named_tree(n), noise)
          for n in trees
          for noise in (0.0, strength)
        },
      )
      for tree in trees:
        off, on = rows[tree, 0.0], rows[tree, strength]
        name = f"{suite}, T {t:g}, {tree}"
        gains[name] = measure.interval(measure.tau_difference(off, on)) | {
          "without": measure.tau(off),
          "with": measure.tau(on),
          "prompts": len(on),
        }
        claims.append(
          above(
            gains[name],
            f"Shared noise raises tau: {name}.",
            "with less without",
          )
        )
  return gains, claims


def _confidence(s: Study, data: dict) -> Section:
  strength = s.drafter.config.draft_noise
  cold, warm = s.all_known(0.0), s.all_known(1.0)
  # every strength of the calibration, 0 and its own among them
  strengths = sorted({*calibrate.STRENGTHS, strength})
  curves_at = lambda known, t, noises: {
    noise: evidence.calibration(pairs)
    for noise, pairs in evidence.confidence(
      s.target, s.drafter, known, t, noises
    ).items()
  }
  found = curves_at(warm, 1.0, strengths)
  first = lambda n: found[n]["first_child_accepted"]["value"]
  best = max(found, key=first)
  shown = strength or best
  origin = (
    "calibrated with the drafter"
    if strength
    else "the best on these very prompts, as the drafter is not calibrated: its"
    " gains here are optimistic"
  )
  curves = {
    "temperature 0": curves_at(cold, 0.0, [0.0])[0.0],
    "temperature 1": found[0.0],
    f"temperature 1, noise {shown:g}": found[shown],
  }
  data["calibration"] = {
    "drafter_strength": strength,
    "best_strength_first_child": best,
    "curves": curves,
    "strengths_at_1": {f"{n:g}": c for n, c in found.items()},
  }
  data["noise"], claims = _gains(s, shown)
  gains = data["noise"]
  cold_gap = curves["temperature 0"]["gap"]
  return Section(
    "calibration",
    "f. The drafter's confidence is worth something",
    "A dynamic tree relies on confidence: on the diagonal, a child of"
    " confidence c is the target's token in a share c of cases. Above"
    " temperature 0 the target's noise is known beforehand, so that drafter and"
    " target draw with the same dice; the output cannot change.",
    [
      Claim(
        "Confidence tells acceptance at temperature 0 (mean gap below .05).",
        cold_gap < 0.05,
        f"mean gap {cold_gap:.3f}",
      ),
      *claims,
    ],
    [plots.calibration(curves)] + ([plots.noise(gains)] if gains else []),
    [
      (
        (
          "noise strength at T 1",
          "first child (95%)",
          f"any of {evidence.CHILDREN} (95%)",
          "mean gap",
        ),
        [
          (
            f"{n:g}" + (" (the drafter's)" if n == strength else ""),
            span(c["first_child_accepted"], digits=3),
            span(c["any_child_accepted"], digits=3),
            f"{c['gap']:.3f}",
          )
          for n, c in found.items()
        ],
      ),
      (
        ("suite, temperature, tree", "tau without", "tau with", "gain (95%)"),
        [
          (n, f"{g['without']:.3f}", f"{g['with']:.3f}", span(g, digits=3))
          for n, g in gains.items()
        ],
      ),
    ],
    f"n = {curves['temperature 0']['children']} children of {s.prompts} answers"
    f" at temperature 0; temperatures {WARM} with seed {s.seed}; strength"
    f" {shown:g}, {origin}.",
  )


def _of_answers(s: Study, data: dict, say) -> list[Section]:
  """Sections a and b: one reading of the answers serves both."""
  reads = []
  for suite, questions in s.asked.items():
    kinds = {q.category for q in questions}
    names = [q.category if len(kinds) > 1 else suite for q in questions]
    say(f"reading the answers of {suite}")
    reads += evidence.read(s.target, s.known[suite, 0.0], names, len(reads))
  say("regressing features")
  return [_entropy(s, reads, data), _features(s, reads, data)]


Step = Callable[[Study, dict], list[Section]]


def steps(trees: Sequence[str], limit: int, say) -> dict[str, Step]:
  """What is measured in one go, in order; each puts its numbers into a dict.

  Args:
    trees, limit: as in `speed.section`.
  """
  return {
    "answers": lambda s, data: _of_answers(s, data, say),
    "trees": lambda s, data: list(_trees(s, data)),
    "inputs": lambda s, data: [_inputs(s, data)],
    "calibration": lambda s, data: [_confidence(s, data)],
    "speed": lambda s, data: [speed.section(s, trees, limit, data, say)],
  }
