"""The whole report on a tiny model; its figures against brute force."""

import dataclasses
import itertools
import json
import re
import types

import engines
import folders
import numpy as np
import pytest
import tiny
from engines import unoptimised  # noqa: F401 (compiles fast)
from refusals import refused

from eagle_jax import Sampling, choice, loading
from eagle_jax.bench import (
  evidence,
  measure,
  page,
  replay,
  sections,
  study,
)
from eagle_jax.bench.evidence import Read
from eagle_jax.bench.replay import Known
from eagle_jax.checkpoints import drafters
from eagle_jax.speculation import tree
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request


@pytest.fixture(scope="module")
def report():
  return folders.script("eagle_jax.bench.report")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  base = tmp_path_factory.mktemp("report")
  pair = folders.pair(base, ends=())
  made = tiny.drafter(pair.made, "eagle")
  for inputs in ("feature+token", "token"):
    config = dataclasses.replace(made.config, inputs=inputs)
    drafters.save(
      base / inputs, config, made.params, made.vocabulary, False, {}, "float32"
    )
  pair.ablations = [str(base / "feature+token"), str(base / "token")]
  return pair


@pytest.fixture
def suite(tmp_path):
  def write(prompts: int) -> str:
    file = tmp_path / "small.jsonl"
    rows = [
      {
        "question_id": i,
        "category": ("maths", "code")[i % 2],
        "turns": [f"tell {i} " + "of it " * i],
      }
      for i in range(prompts)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return f"--suite={file}"

  return write


def test_the_whole_report(report, models, suite, tmp_path, monkeypatch, capsys):
  folders.share_programs(monkeypatch)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(choice, "NODES", (1, 8))
  monkeypatch.setattr(choice, "ANSWERS", 5)
  monkeypatch.setattr(choice, "LENGTH", 24)
  out = tmp_path / "out"
  code = folders.call(
    report,
    "report",
    *("--target", models.target, "--drafter", models.drafter),
    *(f"--ablation={d}" for d in models.ablations),
    suite(5),
    *("--max_new_tokens", "20", "--budgets", "6", "--trees", "chain::2"),
    *("--speed_limit", "3", "--batch_size", "5", "--out", str(out)),
  )
  assert code == 0, capsys.readouterr().err
  data = json.loads((out / "report.json").read_text())
  for field in ("device", "date", "versions", "seed", "target", "drafter"):
    assert data[field] or data[field] == 0
  names = ["entropy", "features", "accept_chain", "inputs", "trees"]
  names += ["calibration", "speed"]
  html = (out / "report.html").read_text()
  assert re.findall(r"<h2 id=(\w+)>", html) == names
  assert html.count("<svg") == html.count("</svg>") >= 7
  assert not re.search(r'(src|href)="http', html)  # self-contained
  markdown = (out / "report.md").read_text()
  linked = re.findall(r"\]\((plots/\w+\.svg)\)", markdown)
  assert len(linked) == html.count("<figure>") == 8
  for file in linked:
    assert (out / file).read_text().startswith("<svg")
  for claim in data["claims"]:
    assert claim["claim"] in markdown
  # the numbers of the tables are those of the JSON
  bits = data["entropy"]["bits"]["value"]
  assert f"{bits:.2f} (" in markdown
  assert set(data["inputs"]) == {"feature+token", "token"}
  tau = data["inputs"]["token"]["chain::5"]["tau"]
  assert f"| token | chain::5 | {tau:.3f} (" in markdown
  parts = data["inputs_by_suite"]["small"]  # one suite: the same figures
  assert parts["token"]["chain::5"]["value"] == tau
  right = data["inputs"]["feature+token"]["chain::5"]["tau"]
  less = parts["token"]["chain::5"]["less_than_right"]["value"]
  assert less == pytest.approx(right - tau)
  assert [e["nodes"] for e in data["trees"]["dynamic"]] == [6]
  assert data["speed"]["methods"]["plain"]["ratio_to_plain"] == 1
  assert all(m["diverged"] == 0 for m in data["speed"]["methods"].values())
  assert set(data["costs"]["verify"]) == {"1", "8"}
  beside = data["overhead"]
  assert beside["answers"] == 3
  share = 1 - beside["networks_ms"] / beside["cycle_ms"]
  assert beside["overhead"]["value"] == pytest.approx(share)
  assert "* marks the accepted path" in markdown
  assert report.UNFINISHED not in markdown + html


def test_a_stopped_run_leaves_what_it_has_and_goes_on(
  report, models, suite, tmp_path, monkeypatch
):
  """Stopped in its second step: marked, complete so far, no rests; the same
  command measures the second step alone."""
  done, stop = [], True

  def first(study, data):
    done.append("first")
    data["first"] = {"value": float("nan")}
    claim = page.Claim("is so", None, "by a hair")
    return [page.Section("s", "b. First", "why", [claim], [], [], "n")]

  def second(study, data):
    done.append("second")
    if stop:
      raise KeyboardInterrupt
    return [page.Section("t", "a. Second", "why", [], [], [], "n")]

  steps = {"one": first, "two": second}
  monkeypatch.setattr(report.sections, "steps", lambda *a: steps)
  monkeypatch.setattr(report.replay, "plain_answers", lambda *a: None)
  monkeypatch.setattr(report.generation, "use_compilation_cache", lambda: None)
  out = tmp_path / "out"
  again = lambda *flags: folders.call(
    report,
    "report",
    *("--target", models.target, "--drafter", models.drafter),
    *(suite(4), "--out", str(out), *flags),
  )
  assert again() == 130
  number = lambda: json.loads((out / "report.json").read_text())["first"]
  assert number() == {"value": None}
  for file in ("report.html", "report.md"):
    assert report.UNFINISHED in (out / file).read_text()
    assert "First" in (out / file).read_text()
  assert not list(out.rglob("*.part"))
  stop = False
  assert again() == 0
  assert done == ["first", "second", "second"]
  markdown = (out / "report.md").read_text()
  assert report.UNFINISHED not in markdown
  assert "**undecided**: is so by a hair" in markdown
  assert markdown.index("a. Second") < markdown.index("b. First")
  assert number() == {"value": None}
  assert again("--seed=1") == 0  # another run
  assert done[3:] == ["first", "second"]


@pytest.mark.parametrize(
  ("args", "words"),
  [
    (["--limit=2"], ["suite small has 2 prompts", "--limit"]),
    (["--budgets=8,x"], ["budgets ['8', 'x']"]),
    (["--budgets=2"], ["must be from 3 to 500"]),
    (["--trees=oak"], ["tree 'oak'"]),
    (["--max_new_tokens=4"], ["max_new_tokens 4 must be at least 16"]),
    (["--dtype=int8"], ["dtype 'int8'"]),
    (["--ablation=./none"], ["drafter './none' is not a folder"]),
    (["same"], ["give one drafter for each input"]),
    (["matplotlib"], ["need matplotlib", ".[report]"]),
  ],
)
def test_refused(report, models, suite, tmp_path, args, words, monkeypatch):
  monkeypatch.setattr(report.generation, "use_compilation_cache", lambda: None)
  if args == ["same"]:
    args = [f"--ablation={models.ablations[0]}"] * 2
  if args == ["matplotlib"]:
    args = []
    monkeypatch.setattr(
      report.plots.importlib.util, "find_spec", lambda n: None
    )
  for flag in report.F:
    report.F[flag].unparse()
  given = ["--target", models.target, "--drafter", models.drafter, suite(4)]
  report.F(["report", *given, f"--out={tmp_path / 'out'}", *args])
  with refused(*words):
    report.run(report.F)
  assert not (tmp_path / "out").exists()


# Figures ----------------------------------------------------------------------


def test_inputs_are_told_suite_by_suite(monkeypatch):
  """Differences pair the rows of one suite, and of no other."""
  accepts = {  # of the prompts of a suite of two, and one of three
    "feature+token": [[3, 1], [2], [1, 1], [0, 0], [4]],
    "token": [[1], [0], [2, 0], [0], [1, 1]],
  }
  rows = {
    label: [
      measure.Row(
        list(range(1, 2 + sum(a + 1 for a in mine))), mine, 0.0, None, i, 0.0, 1
      )
      for i, mine in enumerate(lengths)
    ]
    for label, lengths in accepts.items()
  }
  drafter = types.SimpleNamespace(
    config=types.SimpleNamespace(draft_vocab_size=48)
  )
  s = study.Study(
    None,
    drafter,
    dict.fromkeys(accepts, drafter),
    {"a": [None] * 2, "b": [None] * 3},
    {},
    [8],
    5,
    0,
    20,
  )
  monkeypatch.setattr(study.Study, "all_known", lambda *a: None)
  monkeypatch.setattr(
    study.Study,
    "replayed",
    lambda s, known, draftings: {
      (label, n): rows[label] for label, n in draftings
    },
  )
  data = {}
  step = sections.steps([], 1, print)["inputs"]
  (section,) = step(s, data)
  assert len(section.claims) == 2
  tau = lambda label, part: (
    sum(sum(a + 1 for a in x) for x in accepts[label][part])
    / sum(len(x) for x in accepts[label][part])
  )
  for suite, part in (("a", slice(0, 2)), ("b", slice(2, 5))):
    for label in accepts:
      found = data["inputs_by_suite"][suite][label]["chain::5"]
      assert found["value"] == pytest.approx(tau(label, part))
    less = found["less_than_right"]["value"]
    want = tau("feature+token", part) - tau("token", part)
    assert less == pytest.approx(want)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_is_that_of_a_chain_of_one(temperature):
  """A replayed chain of one accepts exactly where the first child hits."""
  target = engines.target()
  drafter = tiny.drafter(target, "eagle")
  requests = [
    Request(engines.prompt(i, n), 40, Sampling(temperature), 4, i)
    for i, n in ((1, 6), (3, 6), (2, 70))
  ]
  plain = Engine(loading.models(target, None, tree.plain()), 3, None)
  known = Known(requests, [r.token_ids for r in plain.generate(requests)])
  strengths = [0.0, 0.5]
  got = evidence.confidence(target, drafter, known, temperature, strengths)
  chain = tree.chain(1)
  walks = replay.replay(
    target, {s: replay.Drafting(drafter, chain, s) for s in strengths}, known, 2
  )
  hits = 0
  for s in strengths:
    for (value, hit), row in zip(got[s], walks[s], strict=True):
      assert len(value) == len(row.tokens) - 1
      assert ((value > 0) & (value <= 1)).all()
      at = 0
      for accepted in row.accept_lengths:
        if at < len(hit) - 1:  # the last token is never drafted
          assert accepted == hit[at, 0]
        at += 1 + accepted
        hits += accepted
  assert hits > 3
  first = [np.concatenate([v[:, 0] for v, _ in got[s]]) for s in strengths]
  assert np.array_equal(*first) == (temperature == 0)


def test_entropy_and_features_against_a_loop():
  """`read` on a known answer: the same features and entropies one by one."""
  import jax
  import jax.numpy as jnp

  from eagle_jax.models import masks
  from eagle_jax.models.target import Target

  target = engines.target(num_layers=1)
  prompt, answer = [3, 1, 4], [1, 5, 9, 2]
  (got,) = evidence.read(
    target, Known([Request(prompt, 4)], [answer]), ["x"], 7
  )
  ids = jnp.asarray([[*prompt, *answer]])
  network = Target(target.config)
  apply = lambda *a, **k: network.apply({"params": target.params}, *a, **k)
  out, _ = apply(
    ids, jnp.arange(7)[None], masks.Attend(own=masks.Causal()), None
  )
  # of the last prompt token and all answer tokens but the last
  np.testing.assert_allclose(got.features, out.feature[0, 2:6], atol=1e-5)
  assert got.tokens.tolist() == [4, 1, 5, 9]
  p = jax.nn.softmax(apply(out.feature[0, 2:6], method="logits"))
  bits = [-sum(x * np.log2(x) for x in row if x > 0) for row in np.asarray(p)]
  np.testing.assert_allclose(got.entropy, bits, rtol=1e-4)
  assert (got.category, got.question) == ("x", 7)


def made_up(prompts: int, n: int, seed: int = 0):
  """Features that follow f' = A f + B e(next token): the drawn token tells."""
  rng = np.random.default_rng(seed)
  D, V = 6, 12
  table = rng.normal(size=(V, D))
  A, B = rng.normal(size=(2, D, D)) * 0.4
  reads = []
  for q in range(prompts):
    tokens = rng.integers(0, V, n)
    f = [rng.normal(size=D)]
    for t in tokens[1:]:
      f.append(A @ f[-1] + B @ table[t])
    reads.append(Read(tokens, np.array(f), np.ones(n), "c", q))
  return reads, table


def test_explained_finds_what_determines_the_next_feature():
  reads, table = made_up(8, 40)
  r2 = evidence.explained(reads, table, 0)
  assert r2["feature+token"]["r2"] > 0.999
  assert r2["feature"]["r2"] < 0.9
  # a token before the draw adds nothing to the feature
  assert abs(r2["feature+unshifted"]["r2"] - r2["feature"]["r2"]) < 0.1
  assert r2["token"]["r2"] < 0.999


def test_ridge_against_the_closed_form():
  rng = np.random.default_rng(1)
  X, Y = [rng.normal(size=(30, 4))], [rng.normal(size=(30, 2))]
  fits = evidence._ridge(X, Y, [0])
  x = (X[0] - X[0].mean(0)) / X[0].std(0)
  y = Y[0] - Y[0].mean(0)
  gram = x.T @ x
  for ridge, fit in zip(evidence.RIDGE, fits, strict=True):
    lam = ridge * np.trace(gram) / 4
    wanted = np.linalg.solve(gram + lam * np.eye(4), x.T @ y)
    np.testing.assert_allclose(fit[3], wanted, atol=1e-6)


def test_smoothness_of_a_slow_walk():
  rng = np.random.default_rng(2)
  walk = np.cumsum(rng.normal(size=(50, 8)), 0)
  reads = [Read(rng.integers(0, 9, 50), walk, np.ones(50), "c", 0)] * 3
  found = evidence.smoothness(reads, rng.normal(size=(9, 8)), 0)
  cos = [
    a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    for a, b in itertools.pairwise(walk)
  ]
  near = found["feature"]["neighbours"]
  assert near["value"] == pytest.approx(np.mean(cos))
  assert near["value"] > found["feature"]["apart"]["value"]
  assert sum(found["feature"]["histogram"]["share"]) == pytest.approx(1)


def test_calibration_against_a_loop():
  rng = np.random.default_rng(3)
  pairs = []
  for n in (40, 25):
    value = rng.random((n, 4))
    pairs.append((value, rng.random((n, 4)) < value))
  found = evidence.calibration(pairs)
  value = np.concatenate([v.ravel() for v, _ in pairs])
  hit = np.concatenate([h.ravel() for _, h in pairs])
  gap = 0
  for b in found["bins"]:
    inside = (value >= b["from"]) & (value < b["to"])
    assert b["n"] == inside.sum()
    assert b["confidence"] == pytest.approx(value[inside].mean())
    assert b["accepted"] == pytest.approx(hit[inside].mean())
    gap += abs(value[inside].sum() - hit[inside].sum())
  assert found["gap"] == pytest.approx(gap / value.size)
  first = np.concatenate([h[:, 0] for _, h in pairs]).mean()
  assert found["first_child_accepted"]["value"] == pytest.approx(first)


def test_accept_chain_of_a_geometric_drafter():
  p, L = 0.6, 5
  E = sum(p**i for i in range(L + 1))
  figures = {"tau": E, "levels": L, "accept_by_depth": [p] * L}
  chain = evidence.accept_chain(figures)
  assert chain["implied_p"] == pytest.approx(1 - 1 / E)
  assert chain["cut_p"] == pytest.approx(p, abs=1e-4)
  assert max(map(abs, chain["gap"])) < 1e-3


def test_claims_are_told_plainly():
  claims = [
    page.Claim(f"a < b {x}", h, "detail")
    for x, h in (("one", True), ("two", False), ("three", None))
  ]
  section = page.Section("s", "t", "why", claims, [], [(("a",), [("|",)])], "n")
  html = page.as_html("T", ["f"], [section])
  assert "a &lt; b one" in html
  assert html.count("does NOT hold") == 2  # on top, and in its section
  markdown = page.as_markdown("T", ["f"], [section], "plots")
  assert "- **does NOT hold**: a < b two detail" in markdown
  assert "| \\| |" in markdown
  rows = lambda n: [
    measure.Row([0] * (n + 2), [n], 1.0, None, q, 1.0, 5) for q in range(4)
  ]
  from eagle_jax.bench.study import ordered

  assert ordered(rows(2), rows(1), "x", "y").holds is True
  assert ordered(rows(1), rows(2), "x", "y").holds is False
