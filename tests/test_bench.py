"""Figures against brute-force twins; a small run; refused suites."""

import collections
import importlib.util
import json

import folders
import numpy as np
import pytest

from eagle_jax.bench import measure, suites
from eagle_jax.bench.measure import Row
from eagle_jax.errors import InputError
from eagle_jax.speculation.audit import Divergence
from eagle_jax.speculation.engine import Engine

DOCUMENTED = {
  *("tau", "accept_by_depth", "tokens_per_s", "tokens", "answers", "prompts"),
  "diverged",
  *("ratio_to_plain", "ratio_low", "ratio_high"),
}
MORE = {"tau_without_loops", "tau_by_context", "cycles", "near_ties"}


def row(
  accept_lengths,
  seconds=1.0,
  tokens=None,
  divergence=None,
  question=0,
  prompt_tokens=5,
) -> Row:
  n = 1 + sum(a + 1 for a in accept_lengths)
  return Row(
    list(range(n)) if tokens is None else tokens,
    list(accept_lengths),
    seconds,
    divergence,
    question,
    seconds,
    prompt_tokens,
  )


# Figures --------------------------------------------------------------------


def until_loop(ids, n):
  """Twin: the first end of an n-gram that was there before, less one."""
  grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
  ends = [i + n for i, g in enumerate(grams) if g in grams[:i]]
  return ends[0] - 1 if ends else len(ids)


def test_until_loop():
  assert measure.until_loop(list("abcabca"), 3) == 5
  assert measure.until_loop([7] * 50) == measure.LOOP
  assert measure.until_loop([], 3) == 0
  rng = np.random.default_rng(0)
  for _ in range(300):
    ids = rng.integers(0, 3, rng.integers(0, 20)).tolist()
    n = int(rng.integers(1, 6))
    assert measure.until_loop(ids, n) == until_loop(ids, n)


def test_tau_is_a_ratio_of_sums():
  # 1 + 3 + 1 tokens in two cycles, 1 + 2 in one: (4 + 2) / 3
  assert measure.tau([row([2, 0]), row([1])]) == 2.0
  assert measure.tau([row([0] * 9)]) == 1.0  # plain decoding
  assert measure.tau([row([])]) is None  # prefill's token alone
  assert measure.tau([]) is None


def test_tau_without_loops_cuts_the_tail():
  fresh = list(range(100, 130))  # prefill's token and 29 more
  ids = fresh + [7] * 40  # 7 x 20 ends at 50, 7 x 20 again at 51
  assert measure.until_loop(ids) == 50
  # No draft accepted before the loop, 3 in each cycle inside it:
  accepts = [0] * 29 + [3] * 10
  rows = [Row(ids, accepts, 1.0, None, 0, 1.0, 5)]
  assert measure.tau(rows) == 69 / 39
  # 49 tokens kept after prefill's: 29 cycles of one, five of four
  assert measure.tau(rows, loops=False) == 49 / 34
  # a cut inside a cycle counts the cycle and the tokens before the cut
  inside = [Row(ids, [0] * 29 + [2] * 13 + [0], 1.0, None, 0, 1.0, 5)]
  assert measure.tau(inside, loops=False) == 49 / (29 + 7)
  assert measure.tau([row([1, 1])], loops=False) == 2.0


def accept_by_depth(rows):
  """Twin: count cycle by cycle."""
  tried, hit = collections.Counter(), collections.Counter()
  for r in rows:
    for a in r.accept_lengths:
      for depth in range(a + 1):
        tried[depth] += 1
        hit[depth] += depth < a
  return [hit[d] / tried[d] for d in sorted(tried) if hit[d]]


def test_accept_by_depth():
  assert measure.accept_by_depth([row([2, 0, 1]), row([0])]) == [2 / 4, 1 / 2]
  assert measure.accept_by_depth([row([0, 0])]) == []
  assert measure.accept_by_depth([row([])]) == []
  assert measure.accept_by_depth([]) == []
  rng = np.random.default_rng(1)
  for _ in range(50):
    rows = [
      row(rng.geometric(0.5, rng.integers(0, 6)) - 1)
      for _ in range(rng.integers(1, 4))
    ]
    got = measure.accept_by_depth(rows)
    np.testing.assert_allclose(got, accept_by_depth(rows))


def tau_by_context(rows):
  """Twin: walk along each answer, cycle by cycle."""
  kept = collections.defaultdict(list)
  for r in rows:
    at = r.prompt_tokens
    for a in r.accept_lengths:
      kept[max(e for e in measure.EDGES if e <= at)].append(a + 1)
      at += a + 1
  return {
    str(e): {"tau": float(np.mean(k)), "cycles": len(k)}
    for e, k in sorted(kept.items())
  }


def test_tau_by_context():
  # cycles begin at 254 and 255 tokens, then at 257
  got = measure.tau_by_context([row([0, 1, 3], prompt_tokens=254)])
  assert got["0"] == {"tau": 1.5, "cycles": 2}
  assert got["256"] == {"tau": 4.0, "cycles": 1}
  assert measure.tau_by_context([row([])]) == {}
  rng = np.random.default_rng(3)
  rows = [
    row(rng.geometric(0.5, 90) - 1, prompt_tokens=int(n))
    for n in rng.integers(0, 9000, 40)
  ]
  assert measure.tau_by_context(rows) == tau_by_context(rows)


def test_the_table_splits_tau_where_contexts_differ(bench):
  rows = {"chain": [row([0] * 300)], "plain": [row([0])]}
  figures = {
    "suites": {"s": measure.summary(rows)},
    "turns_left_out": {},
    "plain_to_transformers": {},
  }
  lines = bench.table(figures).splitlines()
  assert "| suite | method | tau from 0 tokens | tau from 256 tokens |" in lines
  assert lines[-1] == "| s | chain | 1.00 | 1.00 |"
  short = figures | {"suites": {"s": measure.summary({"plain": [row([0])]})}}
  assert "tau from" not in bench.table(short)


def test_ratio():
  rng = np.random.default_rng(2)
  seconds = rng.uniform(0.5, 5, 20)  # prompts differ tenfold, the pairs little
  noise = rng.uniform(0.9, 1.1, 20)
  plain = [row([0] * 9, s, question=q) for q, s in enumerate(seconds)]
  twice = [
    row([0] * 9, s / 2 * e, question=q)
    for q, (s, e) in enumerate(zip(seconds, noise, strict=True))
  ]
  value, low, high = measure.ratio(plain, twice)
  assert value == pytest.approx(
    sum(r.seconds for r in plain) / sum(r.seconds for r in twice)
  )
  assert low < value < high
  assert low < 2 < high
  assert high - low < 0.2  # pairs: unpaired prompts would spread far more
  assert measure.ratio(plain, twice) == (value, low, high)  # deterministic
  assert measure.ratio(plain, plain) == (1.0, 1.0, 1.0)
  one = measure.ratio([row([0], 3.0)], [row([0], 1.0)])
  assert one == pytest.approx((3, 3, 3))


def test_intervals_resample_questions_not_turns():
  """Many turns of one question are one draw: the interval does not shrink."""
  rng = np.random.default_rng(3)
  speeds = rng.uniform(1, 3, 8)
  make = lambda turns, s: [
    row([0] * 9, 1 / v if s else 1.0, question=q)
    for q, v in enumerate(speeds)
    for _ in range(turns)
  ]
  once = measure.ratio(make(1, False), make(1, True))
  often = measure.ratio(make(9, False), make(9, True))
  np.testing.assert_allclose(often, once)
  # and the twin, by hand: draw questions, sum their tokens and seconds
  draws = np.random.default_rng(0).integers(0, 8, (measure.DRAWS, 8))
  got = sorted(8 / sum(1 / speeds[q] for q in draw) for draw in draws)
  assert once[1] == pytest.approx(np.percentile(got, 2.5))
  # order of the rows does not pair other questions
  assert measure.ratio(make(1, False), make(1, True)[::-1]) == once


def test_tau_difference_is_paired():
  a = [row([n], question=n) for n in range(4)]
  value, low, high = measure.tau_difference(a, a)
  assert (value, low, high) == (0, 0, 0)
  b = [row([n + 1], question=n) for n in range(4)]
  assert measure.tau_difference(a, b) == (1, 1, 1)
  assert measure.tau_interval(b)[0] == measure.tau(b)


def test_ratio_counts_tokens_and_seconds():
  # 2 tokens in 1 s against 4 tokens in 1 s
  assert measure.ratio([row([0])], [row([2])])[0] == 2.0


def test_summary_has_the_documented_fields():
  near = Divergence(3, 1, 2, 1e-6, 1e-4, True)
  far = Divergence(3, 1, 2, 0.5, 1e-4, False)
  rows = {
    "plain": [row([0, 0], 2.0), row([0, 0], 2.0)],
    "chain": [row([1], 1.0, divergence=near), row([1], 1.0, divergence=far)],
  }
  out = measure.summary(rows)
  assert list(out) == ["plain", "chain"]
  for figures in out.values():
    assert set(figures) == DOCUMENTED | MORE
  json.dumps(out)
  assert out["plain"]["tau"] == 1.0
  assert out["plain"]["ratio_to_plain"] == 1.0
  chain = out["chain"]
  assert (chain["tau"], chain["accept_by_depth"]) == (2.0, [1.0])
  assert (chain["tokens"], chain["cycles"]) == (6, 2)
  assert (chain["answers"], chain["prompts"]) == (2, 1)
  assert (chain["tokens_per_s"], chain["ratio_to_plain"]) == (3.0, 2.0)
  assert chain["diverged"] == 1  # the near tie is excused, and listed
  assert [d["excused"] for d in chain["near_ties"]] == [True, False]
  alone = measure.summary({"chain": rows["chain"]})["chain"]
  assert set(alone) == (DOCUMENTED | MORE) - {
    *("ratio_to_plain", "ratio_low", "ratio_high")
  }


# Suites ---------------------------------------------------------------------


def test_the_shipped_suite():
  questions = suites.read(suites.SHIPPED, 0)
  assert len(questions) == 24
  assert len({q.number for q in questions}) == 24
  assert len({q.category for q in questions}) >= 5
  assert any(len(q.turns) > 1 for q in questions)
  assert suites.read(suites.SHIPPED, 3) == questions[:3]


@pytest.mark.parametrize(
  ("second", "word"),
  [
    ('{"question_id": 2}', "turns must be a list of texts"),
    ('{"question_id": 2, "turns": []}', "turns must be"),
    ('{"question_id": 2, "turns": "hi"}', "turns must be"),
    ('{"question_id": 2, "turns": ["a", ""]}', "turns must be"),
    ('{"question_id": "2", "turns": ["a"]}', "question_id must be a number"),
    ('{"turns": ["a"]}', "question_id must be a number"),
    ("no json", "not valid JSON"),
    ("[]", "JSON object"),
  ],
)
def test_bad_rows_name_file_and_line(tmp_path, second, word):
  file = tmp_path / "s.jsonl"
  file.write_text('{"question_id": 1, "turns": ["a"]}\n' + second + "\n")
  with pytest.raises(InputError, match=word) as e:
    suites.read(file, 0)
  assert str(e.value).startswith(f"{file}:2: ")


# The command ----------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  return folders.pair(tmp_path_factory.mktemp("bench"), ends=())


@pytest.fixture(scope="module")
def bench():
  return folders.script("eagle_jax.bench.__main__")


@pytest.fixture
def suite(tmp_path):
  def write(name: str, *turns: list[str], first: int = 10):
    file = tmp_path / f"{name}.jsonl"
    rows = [
      {"question_id": first + i, "category": "c", "turns": t}
      for i, t in enumerate(turns)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return f"--suite={file}"

  return write


def test_a_run_over_two_suites(
  bench, models, suite, tmp_path, capsys, monkeypatch
):
  folders.share_programs(monkeypatch)
  asked = []
  generate = Engine.generate

  def spy(self, requests, *args, **kw):
    results = generate(self, requests, *args, **kw)
    asked.append((self.models.spec.kind, requests[0], results[0]))
    return results

  monkeypatch.setattr(Engine, "generate", spy)
  methods = ["plain", "chain", "static", "dynamic"]
  code = folders.call(
    bench,
    "bench",
    *("--target", models.target, "--drafter", models.drafter),
    suite("one", ["abc", "def"], ["ghi"]),
    suite("two", ["jkl"], first=20),
    *("--methods", ",".join(methods), "--max_new_tokens", "8"),
    *("--out", str(tmp_path / "out"), "--temperature", "0.7"),
  )
  out, err = capsys.readouterr()
  assert code == 0, err
  figures = json.loads((tmp_path / "out" / "bench.json").read_text())
  assert list(figures["suites"]) == ["one", "two"]
  for name, answers, prompts in (("one", 3, 2), ("two", 1, 1)):
    assert list(figures["suites"][name]) == methods
    for f in figures["suites"][name].values():
      assert set(f) == DOCUMENTED | MORE
      assert (f["answers"], f["prompts"]) == (answers, prompts)
      assert f["diverged"] == 0
      assert f["tokens"] == figures["suites"][name]["plain"]["tokens"]
  assert out == (tmp_path / "out" / "bench.md").read_text()
  assert out.count("\n| one |") == out.count("\n| two |") == 4
  assert not list((tmp_path / "out").glob("*.part"))
  # Every method answered the same prompts with the same tokens.
  said_by = {}
  for number, turn in ((10, 0), (10, 1), (11, 0)):
    found = [
      (kind, tuple(r.prompt_ids), tuple(x.token_ids))
      for kind, r, x in asked
      if (r.number, r.sample) == (number, turn)
    ]
    assert {kind for kind, _, _ in found} == set(methods)
    assert len({f[1:] for f in found}) == 1
    said_by[number, turn] = found[0][1:]
  # The second turn continues the conversation.
  prompt, tokens = said_by[10, 0]
  said = [t for t in tokens if t >= len(folders.SPECIAL)]
  after = [folders.END, folders.USER, *folders.ids_of("def")]
  after += [folders.END, folders.ASSISTANT]
  assert list(said_by[10, 1][0]) == [*prompt, *said, *after]


@pytest.mark.parametrize(
  ("args", "word"),
  [
    (["--methods=plain,chian"], "'chian' is unknown: use some of plain, chain"),
    (["--methods="], "no methods"),
    (["--methods=plain,oak:3"], "tree 'oak:3': tree 'oak' is unknown"),
    (["--methods=transformers"], "alone measures no EAGLE: add plain"),
    (["--limit=-1"], "limit -1"),
    (["--turns=-1"], "turns -1"),
    (["--max_new_tokens=0"], "max_new_tokens 0"),
    (["--seed=-1"], "seed -1"),
    (["--temperature=-1"], "temperature -1"),
    (["--dtype=int8"], "dtype 'int8'"),
    (["--methods=plain,dynamic:3"], "3 nodes are fewer"),
    (["--suite=none.jsonl"], "none.jsonl: cannot be read"),
    (["--suite=a/x.jsonl", "--suite=b/x.jsonl"], "same file name"),
    (["--target=./none", "--drafter=./none"], "'./none' is not a folder"),
    (["--metods=a"], "Did you mean: methods"),
    (["prompt"], "'prompt' is not a flag: see bench --help"),
  ],
)
def test_refused(bench, models, args, word, tmp_path, capsys):
  code = folders.call(
    bench,
    "bench",
    *("--target", models.target, "--drafter", models.drafter),
    *("--out", str(tmp_path / "out")),
    *args,
  )
  out, err = capsys.readouterr()
  assert (code, out) == (2, "")
  assert err.startswith("bench: ")
  assert err.count("\n") == 1
  assert word in err
  assert not (tmp_path / "out").exists()


def test_a_turn_past_the_context_is_left_out_and_said(
  bench, models, suite, tmp_path, capsys, monkeypatch
):
  folders.share_programs(monkeypatch)
  code = folders.call(
    bench,
    "bench",
    *("--target", models.target, "--methods", "plain"),
    suite("long", ["abc", "x" * 300, "y"], ["def"]),
    *("--max_new_tokens", "8", "--out", str(tmp_path / "out")),
  )
  out, err = capsys.readouterr()
  assert code == 0, err
  figures = json.loads((tmp_path / "out" / "bench.json").read_text())
  assert figures["turns_left_out"] == {"long": 2}
  assert figures["suites"]["long"]["plain"]["answers"] == 2
  assert "long: 2 later turns did not fit the context and were left out" in out


def test_transformers_gives_the_same_greedy_tokens(
  bench, models, suite, tmp_path, capsys, monkeypatch
):
  pytest.importorskip("torch")
  folders.share_programs(monkeypatch)
  code = folders.call(
    bench,
    "bench",
    *("--target", models.target, "--methods", "plain,transformers"),
    suite("one", ["abc"], ["def ghi"]),
    *("--max_new_tokens", "8", "--out", str(tmp_path / "out")),
  )
  out, err = capsys.readouterr()
  assert code == 0, err
  figures = json.loads((tmp_path / "out" / "bench.json").read_text())
  peer = figures["suites"]["one"]["transformers"]
  assert peer["diverged"] == 0
  assert peer["near_ties"] == []
  assert peer["tokens"] == figures["suites"]["one"]["plain"]["tokens"] == 16
  assert peer["tau"] is None
  value, low, high = figures["plain_to_transformers"]["one"]
  assert value == pytest.approx(1 / peer["ratio_to_plain"])
  assert low <= value <= high
  assert f"| one | plain / transformers | | | | {value:.2f} |" in out


def test_transformers_needs_torch(bench, models, tmp_path, capsys, monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda n: None if n == "torch" else find(n)
  )
  code = folders.call(
    bench,
    "bench",
    *("--target", models.target, "--methods", "plain,transformers"),
    *("--out", str(tmp_path / "out")),
  )
  err = capsys.readouterr().err
  assert code == 2
  assert err.startswith("bench: method 'transformers' needs torch")
  assert err.count("\n") == 1


def test_out_must_be_a_folder(bench, models, suite, tmp_path, capsys):
  (tmp_path / "file").write_text("kept")
  code = folders.call(
    bench,
    "bench",
    *("--target", models.target, "--methods", "plain", suite("s", ["a"])),
    *("--out", str(tmp_path / "file")),
  )
  err = capsys.readouterr().err
  assert code == 2
  assert err.startswith("bench: out '")
  assert (tmp_path / "file").read_text() == "kept"
