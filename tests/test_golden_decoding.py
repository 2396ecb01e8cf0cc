"""Trees, accepted lengths and ids of the original PyTorch code.

One engine a case and tree decodes the three golden prompts together and shows
every cycle's draft tree; the original's are stored node by node.
"""

import types

import engines
import numpy as np
import pytest

from eagle_jax import loading
from eagle_jax.checkpoints import drafters, hf_target
from eagle_jax.loading import LoadedTarget
from eagle_jax.speculation import tree
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request

CASES = (
  "eagle2_llama",
  "eagle2_llama_bin",
  "eagle2_qwen2",
  "eagle3_llama",
  "eagle3_qwen3",
)
TREES = ("t60", "t12")
CLOSE = 5e-4  # score gap below which the order is open (the vectors' README)


@pytest.fixture(scope="module")
def decoded(golden):
  """(case, tree) -> engine, requests, results and all draft trees."""
  made = {}

  def load(case, name):
    if (case, name) not in made:
      if case.endswith("_bin"):
        pytest.importorskip("torch")
      g = golden(case)
      config, params = hf_target.load(g.folder / "target", "float32")
      target = LoadedTarget(case, config, params, None, ())
      drafter = drafters.load(g.folder / "drafter", config, params)
      if name == "static":
        spec = tree.eagle1()
      else:
        s = g.facts["settings"][name]
        spec = tree.dynamic(s["total_token"], s["depth"] + 1, s["top_k"])
      engine = Engine(loading.models(target, drafter, spec), 3, None)
      prompts = [g.arrays[f"prompt{i}"][0].tolist() for i in range(3)]
      trees = []
      # longer than the original ran, so that no cycle of its is cut
      results = engine.generate(
        [Request(p, 80) for p in prompts],
        watch_trees=lambda t, out: trees.append(t),
      )
      made[case, name] = types.SimpleNamespace(
        g=g, engine=engine, prompts=prompts, results=results, trees=trees
      )
    return made[case, name]

  return load


def paths(tokens, parent):
  """The token path of every node but the root."""
  found = []
  for i in range(1, len(tokens)):
    path, at = (), i
    while at > 0:
      path, at = (int(tokens[at]), *path), parent[at]
    found.append(path)
  return found


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("case", CASES)
def test_first_tree_node_for_node(decoded, case, name):
  d = decoded(case, name)
  want = lambda key: d.g.arrays[f"draft/{name}/step0/{key}"]
  got = d.trees[0]
  ours = paths(got.tokens[0], got.parent[0])
  tokens, parent = want("draft_tokens")[0], want("parent")
  theirs = paths(tokens, parent)
  scores = dict(zip(ours, got.scores[0, 1:].tolist(), strict=True))
  for path, score in zip(theirs, want("node_scores").tolist(), strict=True):
    assert scores[path] == pytest.approx(score, rel=1e-4, abs=2e-5), path
  gaps = d.g.facts["draft_gaps"][name][0]
  assert gaps["step"] == 0
  assert gaps["min_cut_gap"] >= CLOSE
  assert sorted(ours) == sorted(theirs)
  if gaps["min_order_gap"] >= CLOSE:
    assert got.tokens[0].tolist() == tokens.tolist()
    assert got.parent[0, 1:].tolist() == parent[1:].tolist()
    assert got.level[0].tolist() == want("tree_position_ids").tolist()
    mask = want("tree_mask")[0, 0] > 0
    assert got.ancestors[0].tolist() == mask.tolist()


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("case", CASES)
def test_every_tree_holds_the_same_paths(decoded, case, name):
  d = decoded(case, name)
  compared = 0
  for i in range(3):
    want = lambda key, i=i: d.g.arrays[f"gen/{name}/p{i}/{key}"]
    for step in range(len(want("accept"))):
      got = d.trees[step]
      assert got.tokens[i, 0] == want("draft_tokens")[step, 0]
      if want("draft_cut_gap")[step] < CLOSE:
        continue
      ours = paths(got.tokens[i], got.parent[i])
      theirs = paths(want("draft_tokens")[step], want("parent")[step])
      assert sorted(ours) == sorted(theirs), (i, step)
      compared += 1
      if want("draft_order_gap")[step] >= CLOSE:
        assert ours == theirs, (i, step)
  assert compared > 30


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("case", CASES)
def test_ids_and_accept_lengths(decoded, case, name):
  d = decoded(case, name)
  for i, (ids, result) in enumerate(zip(d.prompts, d.results, strict=True)):
    naive = d.g.arrays[f"gen/naive/p{i}/ids"][0].tolist()
    assert [*ids, *result.token_ids][: len(naive)] == naive
    theirs = d.g.arrays[f"gen/{name}/p{i}/ids"][0].tolist()
    assert [*ids, *result.token_ids][: len(theirs)] == theirs
    accept = d.g.arrays[f"gen/{name}/p{i}/accept"].tolist()
    assert result.accept_lengths[: len(accept)] == accept


@pytest.mark.parametrize("case", CASES)
def test_answers_are_cut_where_the_original_runs_on(decoded, case):
  d = decoded(case, "t12")
  got = d.engine.generate([Request(p, 64) for p in d.prompts])
  for i, result in enumerate(got):
    naive = d.g.arrays[f"gen/naive/p{i}/ids"][0].tolist()
    n = len(d.prompts[i])
    assert result.token_ids == naive[n : n + 64]
    assert result.finish_reason == "length"
    engines.check_counts(result)


@pytest.mark.parametrize("case", CASES)
def test_end_id_ends_the_answer(decoded, case):
  d = decoded(case, "t12")
  engine = engines.with_ends(d.engine, (d.g.facts["eos_id_of_eos_run"],))
  result = engine.generate([Request(d.prompts[0], 64)])[0]
  naive = d.g.arrays["gen_eos/naive/p0/ids"][0].tolist()
  assert [*d.prompts[0], *result.token_ids] == naive
  # the original keeps what followed the end id in its cycle
  assert d.g.arrays["gen_eos/t12/p0/ids"][0].tolist()[: len(naive)] == naive
  assert result.finish_reason == "stop"
  engines.check_counts(result)


def test_static_tree_accepts_what_version_1_accepted(decoded):
  d = decoded("eagle2_llama", "static")
  for i, (ids, result) in enumerate(zip(d.prompts, d.results, strict=True)):
    theirs = d.g.arrays[f"static/gen/p{i}/ids"][0].tolist()
    assert [*ids, *result.token_ids][: len(theirs)] == theirs
    accept = d.g.arrays[f"static/gen/p{i}/accept"].tolist()
    assert result.accept_lengths[: len(accept)] == accept
    drafts = d.g.arrays[f"static/gen/p{i}/draft_tokens"]
    for step in range(len(accept)):
      ours = d.trees[step].tokens[i].tolist()
      assert ours == drafts[step].tolist(), (i, step)
  mask = d.g.arrays["static/tree_mask"][0, 0] > 0
  assert d.trees[0].ancestors[0].tolist() == mask.tolist()
  assert np.isfinite(d.trees[0].scores).all()
