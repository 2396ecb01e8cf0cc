"""--tree auto: the estimate against real trees, the rule, and what it keeps."""

import dataclasses
import json

import engines
import folders
import jax.numpy as jnp
import numpy as np
import pytest
import test_losses
import tiny
from engines import unoptimised  # noqa: F401 (compiles fast)

from eagle_jax import choice, costs, generation, loading
from eagle_jax.config import Sampling
from eagle_jax.models.drafter import Drafter
from eagle_jax.options import DecodeOptions
from eagle_jax.session import Session
from eagle_jax.speculation import sampling, tree
from eagle_jax.training import acceptance, batches, losses


def observed(n: int, levels: int = 8, width: int = 10, seed: int = 0):
  """Made up: confident drafters hit more often, as real ones do."""
  rng = np.random.default_rng(seed)
  logits = np.sort(rng.normal(0, 2, (n, levels, width)))[..., ::-1]
  scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - 0.2
  odds = np.cumsum(np.exp(scores), -1)
  drawn = rng.random((n, levels, 1))
  return acceptance.Observed(
    scores.astype(np.float32),
    (drawn > odds).sum(-1).astype(np.int32),
    np.sort(rng.integers(0, 3, n)).astype(np.int32),
  )


def walked(accepted, run) -> float:
  """Tokens a pass, context by context."""
  tokens = cycles = skip = 0
  for i, a in enumerate(accepted):
    if i and run[i] != run[i - 1]:
      skip = 0
    if skip:
      skip -= 1
      continue
    tokens, cycles, skip = tokens + 1 + a, cycles + 1, a
  return tokens / cycles


def test_cycles_start_where_the_one_before_ended():
  accepted = np.array([2, 2, 2, 0, 0, 0])
  run = np.array([4, 4, 4, 4, 9, 9])
  assert acceptance.along(accepted, run) == 6 / 4
  # a cycle may end beyond its run, where all its tokens were still observed
  assert acceptance.along(np.array([0, 5, 1]), np.array([0, 0, 1])) == 9 / 3


@pytest.mark.parametrize("size", [(5, 3, 2), (12, 4, 3), (60, 6, 10)])
def test_estimate_against_real_trees(size):
  """The twin grows the trees with `tree`: token 1 marks the true path."""
  M, L, b = size
  seen = observed(40)
  n = len(seen.rank)
  rng = np.random.default_rng(0)
  own = np.minimum(seen.scores[:, :, :b], 0)
  mark = lambda level: (np.arange(b) == seen.rank[:, level, None]).astype(int)
  spec = tree.dynamic(M, L, b)
  levels = [tree.first_level(jnp.asarray(mark(0)), jnp.asarray(own[:, 0]))]
  for level in range(1, L):
    best = np.asarray(tree.frontier(spec, level, levels[-1]))
    take = lambda a, i=best: np.take_along_axis(np.asarray(a), i, 1)
    tokens, scores = take(levels[-1].tokens), take(levels[-1].scores)
    true = (tokens == 1)[..., None]
    others = own[rng.integers(0, n, best.shape), level]
    levels.append(
      tree.next_level(
        jnp.asarray(tokens),
        jnp.asarray(scores),
        jnp.asarray(best + tree.level_start(spec, level)),
        jnp.asarray(np.where(true, mark(level)[:, None], 0)),
        jnp.asarray(np.where(true, own[:, None, level], others)),
        jnp.zeros(2, bool),
      )
    )
  grown = tree.build(spec, jnp.full(n, 7), levels)
  wanted = walked(np.asarray((grown.tokens == 1).sum(1)).tolist(), seen.run)
  got = acceptance.tokens_a_pass(seen)[acceptance.dynamic_name(M, L, b)]
  assert got == pytest.approx(wanted)
  assert got > 1.3


def test_estimate_of_fixed_trees():
  seen = observed(200)
  got = acceptance.tokens_a_pass(seen)
  for L in acceptance.LEVELS:
    first = [
      next((i for i, r in enumerate(row[:L]) if r), L)
      for row in seen.rank.tolist()
    ]
    assert got[f"chain::{L}"] == pytest.approx(walked(first, seen.run))
  paths = set(tree.EAGLE1_PATHS)
  deep = [
    sum(tuple(row[:d]) in paths for d in range(1, 6))
    for row in seen.rank.tolist()
  ]
  assert got["static"] == pytest.approx(walked(deep, seen.run))
  for name in got:
    generation.named_tree(name)  # every name is a tree that can be built


def test_observe_is_the_unrolled_drafter(monkeypatch):
  monkeypatch.setattr(acceptance, "LEVELS", (1, 2, 3))
  target = engines.target(num_layers=1)
  drafter = tiny.drafter(target, "eagle")
  packed = test_losses.pack(test_losses.documents([24, 14]), 40)
  seen = acceptance.observe(
    target,
    drafter,
    packed.tokens,
    packed.mask,
    packed.documents,
    packed.positions,
  )
  batch = test_losses.batch_of(target, drafter, packed)
  module = Drafter(drafter.config)
  outs = losses.unroll(module, drafter.params, batch, 3, None, False)
  rows = np.flatnonzero(np.asarray(losses.counted(batch, 2))[0])
  assert len(rows) == len(seen.rank) > 5
  for i in (0, 2):
    logits = np.asarray(
      module.apply({"params": drafter.params}, outs[i][0], method="logits")
    )
    for at, row in enumerate(rows):
      best = np.argsort(-logits[row], kind="stable")[:10]
      token = packed.tokens[0, row + 2 + i]
      found = np.flatnonzero(drafter.vocabulary[best] == token)
      assert seen.rank[at, i] == (found[0] if found.size else 10)
  parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
  assert len(parts) > 1
  assert [(seen.run == r).sum() for r in np.unique(seen.run)] == [
    len(p) for p in parts
  ]
  # the same document as a prompt and an answer, a row of its own
  ids, answer = packed.tokens[0], packed.mask[0]
  first = (packed.documents[0] == 1).sum()
  n = int(answer[:first].argmax())
  alone = acceptance.of_answers(target, drafter, [ids[:n]], [ids[n:first]])
  np.testing.assert_array_equal(alone.rank, seen.rank[: len(alone.rank)])
  assert 0 < len(alone.rank) < len(rows)
  shares = seen.by_rank()
  assert shares.shape == (3, 10)
  np.testing.assert_allclose(
    shares[0], [(seen.rank[:, 0] == r).mean() for r in range(10)]
  )


def test_observed_drafts_use_the_noise_that_the_answer_was_drawn_with(
  monkeypatch,
):
  """Against a loop over contexts."""
  monkeypatch.setattr(acceptance, "LEVELS", (1, 2, 3))
  target = engines.target(num_layers=1)
  drafter = tiny.drafter(target, "eagle")
  packed = test_losses.pack(test_losses.documents([24, 14]), 40)
  rows = [getattr(packed, n) for n in batches.FIELDS]
  seed = np.asarray(sampling.row_seed(3, 5, 0))
  drawn = acceptance.Drawn(0.7, 0.6, seed[None])
  seen = acceptance.observe(target, drafter, *rows, drawn)
  batch = test_losses.batch_of(target, drafter, packed)
  module = Drafter(drafter.config)
  outs = losses.unroll(module, drafter.params, batch, 3, None, False)
  counted = np.flatnonzero(np.asarray(losses.counted(batch, 2))[0])
  assert len(counted) == len(seen.rank) > 5
  for i in range(3):
    logits = np.asarray(
      module.apply({"params": drafter.params}, outs[i][0], method="logits")
    )
    for at, row in enumerate(counted):
      position = jnp.asarray([packed.positions[0, row] + 2 + i])
      noise = sampling.gumbel(seed[None], position, tiny.V)[0]
      keys = logits[row] / 0.7 + 0.6 * np.asarray(noise)[drafter.vocabulary]
      best = np.argsort(-keys, kind="stable")[:10]
      found = np.flatnonzero(
        drafter.vocabulary[best] == packed.tokens[0, row + 2 + i]
      )
      assert seen.rank[at, i] == (found[0] if found.size else 10)
      wanted = keys[best] - np.log(np.exp(keys).sum())
      np.testing.assert_allclose(seen.scores[at, i], wanted, atol=1e-4)


COSTS = costs.Costs(
  verify={1: 1.0, 8: 1.5, 16: 2.5},
  head={1: 0.08, 8: 0.15},
  step=0.1,
  decide=0.03,
  first={1: 0.05, 10: 0.1},
  level={1: 0.1, 10: 0.4},
  extend={2: 0.1, 8: 0.15},
)


def test_costs_between_and_beyond_what_was_timed():
  assert COSTS.plain() == pytest.approx(1 + 0.08 + 0.03)
  assert COSTS.verifying(12, 2.0) == pytest.approx(2.0 + 0.2)  # row by row
  one_product = 0.08 + 0.07 * 3 / 7 + 2 * 0.03
  assert COSTS.verifying(4, 2.0) == pytest.approx(1 + 0.5 * 3 / 7 + one_product)
  assert loading.FEW_NODES in choice.NODES
  by_row = dataclasses.replace(COSTS, head={})
  assert by_row.verifying(4, 2.0) == pytest.approx(1 + 0.5 * 3 / 7 + 0.2)
  spec = tree.dynamic(8, 3, 4)  # width 4 a level, five rows to extend
  wide = 0.05 + 0.05 / 9 * 3 + 2 * (0.1 + 0.3 / 9 * 3)
  assert COSTS.drafting(spec) == pytest.approx(wide + 0.1 + 0.05 / 6 * 2)


def test_the_rule_takes_the_most_tokens_a_second():
  taus = {"chain::1": 1.5, "dynamic:8:3:4": 2.4, "dynamic:20:3:4": 9.0}
  rate = lambda n: taus[n] / COSTS.cycle(generation.named_tree(n), taus[n])
  name, speed = choice.best(taus, COSTS)
  assert speed == max(rate("chain::1"), rate("dynamic:8:3:4"))
  assert rate(name) == speed
  # 20 nodes were not timed: they cost too much to be worth timing
  assert name != "dynamic:20:3:4"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return folders.pair(tmp_path_factory.mktemp("choice"))


def test_auto_is_measured_once_and_sizes_win(
  pair, tmp_path, monkeypatch, capsys
):
  """The real measurement, on fewer sizes; then from the cache; then not at
  all where a size is given."""
  folders.share_programs(monkeypatch)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(choice, "NODES", (1, 8))
  monkeypatch.setattr(choice, "ANSWERS", 3)
  monkeypatch.setattr(choice, "LENGTH", 24)
  make = lambda **o: Session(
    DecodeOptions(
      target=pair.target, drafter=pair.drafter, ignore_eos=True, **o
    )
  )
  spec = lambda s: s.generator.models.spec
  first = spec(make(verbose=True))
  said = capsys.readouterr().err
  assert "estimating acceptance on 3 answers" in said
  assert "timing verify and draft passes" in said
  assert "tree auto: " in said.splitlines()[-1]
  assert "x plain" in said.splitlines()[-1]
  (kept,) = (tmp_path / "eagle_jax" / "trees").iterdir()
  found = json.loads(kept.read_text())["choice"]
  assert generation.named_tree(found["tree"]) == first
  assert first.num_nodes <= 8
  assert set(found["costs"]["verify"]) <= {"1", "8"}
  monkeypatch.setattr(costs, "measure", None)  # nothing is timed again
  assert spec(make()) == first
  assert "timing" not in capsys.readouterr().err
  # sampling has costs of its own, timed once for all temperatures
  asked = []
  monkeypatch.setattr(
    costs, "measure", lambda *args: asked.append(args[-2:]) or COSTS
  )
  warm = lambda t, noise=0.5, **o: make(temperature=t, draft_noise=noise, **o)
  first = spec(warm(0.8))
  s = warm(0.8)
  taus = choice.taus_of(s.target, s.drafter, s.sampling, print)
  assert first == generation.named_tree(choice.best(taus, COSTS)[0])
  assert asked == [(0.8, 0.5)]
  assert "estimating acceptance on 3 answers at temp" in capsys.readouterr().err
  spec(warm(0.4))
  assert len(asked) == 1
  assert "estimating acceptance on 3 answers at temp" in capsys.readouterr().err
  # what is cut of the distribution plays no part
  spec(warm(0.4, top_p=0.5))
  assert capsys.readouterr().err == ""
  # nor do drafts without noise cost what those with it do
  spec(warm(0.4, 0.0))
  assert asked == [(0.8, 0.5), (0.4, 0.0)]
  assert len(list((tmp_path / "eagle_jax" / "trees").iterdir())) == 4
  given = spec(make(tree_nodes=5))
  assert (given.kind, given.num_nodes) == ("dynamic", 5)
  assert make(method="plain").generator.models.spec.kind == "plain"


def test_costs_are_timed_again_where_larger_trees_may_pay(
  tmp_path, monkeypatch
):
  """Timing stops at the size that no tree can pay: kept costs say for which
  tokens a pass that was."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  target = engines.target(num_layers=1)
  drafter = tiny.drafter(target, "eagle")
  asked = []
  monkeypatch.setattr(
    costs, "measure", lambda *args: asked.append(args[5]) or COSTS
  )
  timed_for = {"sampled": True, "batch_size": 1}
  for most in (2.0, 1.5, 3.0, 3.0, 2.5):
    found = choice._timed(
      target, drafter, timed_for, Sampling(0.5), most, lambda _: None
    )
    assert found == COSTS
  assert asked == [2.0, 3.0]
  monkeypatch.setattr(choice, "NODES", (1, 8, 16))  # COSTS have them all
  choice._timed(target, drafter, timed_for, Sampling(0.5), 9.0, None)
  assert asked == [2.0, 3.0]


def test_estimated_drafts_draw_with_the_engine_s_own_noise(pair, monkeypatch):
  """At a high temperature noise alone decides: drafts that know it hit, and
  those that do not miss."""
  folders.share_programs(monkeypatch)
  target = loading.load_target(pair.target, "float32", print)
  drafter = tiny.drafter(target, "eagle", tiny.V)
  hits = [
    choice.estimate(
      target,
      drafter,
      Sampling(50.0, draft_noise=noise),
      [[5, 6, 7], [8, 9], [10]],
      24,
    ).by_rank()[0, 0]
    for noise in (0.0, 1.0)
  ]
  assert hits[0] < 0.2 < 0.9 < hits[1]


def test_saved_acceptance_is_used_for_its_own_drafter(pair, tmp_path):
  target = loading.load_target(pair.target, "float32", print)
  folder = tmp_path / "d"
  folders.drafter(folder, pair.made)
  drafter = loading.load_drafter(str(folder), target, print)
  seen, warm = observed(30), observed(30, seed=1)
  choice.save_acceptance(folder, drafter, seen, 0.8, 0.5, warm)
  again = loading.load_drafter(str(folder), target, print)
  taus_of = lambda *how: choice.taus_of(  # says nothing
    target, again, Sampling(*how, draft_noise=0.5), None
  )
  wanted = acceptance.tokens_a_pass(seen)
  cold = taus_of()
  assert cold == {n: round(t, 4) for n, t in wanted.items()}
  hot = taus_of(0.8)
  for name, tau in acceptance.tokens_a_pass(warm).items():
    assert hot[name] == pytest.approx(tau, abs=1e-4)
    between = 0.75 * cold[name] + 0.25 * hot[name]
    assert taus_of(0.2)[name] == pytest.approx(between)
  assert taus_of(1.5) == hot
  # other weights in that folder: the file says nothing of them
  other = dataclasses.replace(
    again,
    params=again.params | {"fc": {"kernel": again.params["fc"]["kernel"] + 1}},
  )
  bare = dataclasses.replace(target, tokenizer=None)
  said = []
  assert choice.taus_of(bare, other, Sampling(), said.append) is None
  assert "without a chat template" in said[0]
  # nor does it of another strength of the shared noise, nor did files from
  # before anything was sampled for them
  how = Sampling(0.8, draft_noise=0.25)
  assert choice.taus_of(bare, again, how, said.append) is None
  assert len(said) == 2
  del again.notes["acceptance"]["sampled"]
  how = Sampling(0.8, draft_noise=0.5)
  assert choice.taus_of(bare, again, how, said.append) is None
  assert len(said) == 3
  assert taus_of() == cold
