"""What the audit excuses: ties that rounding broke, and nothing else."""

import types

import engines
import jax
import numpy as np
import pytest

from eagle_jax import Sampling
from eagle_jax.speculation import audit, sampling
from eagle_jax.speculation.requests import Request

PROMPT = [1, 2, 3]
V = 8
process = jax.jit(sampling.process)


@pytest.fixture
def run(monkeypatch):
  """audit() of two answers where the target's logits are given."""

  def go(logits, plain, other, seed=0, prompt=PROMPT, wide=None, **settings):
    x = np.asarray([logits], np.float32)
    seen = []

    def fake(m, tokens, last):
      seen.append(tokens[0, : last + 1].tolist())
      return x, x if wide is None else np.asarray([wide], np.float32)

    monkeypatch.setattr(audit, "_logits", fake)
    monkeypatch.setattr(audit.rule, "process", process)
    dtype = "float32" if wide is None else "bfloat16"
    m = types.SimpleNamespace(
      ends=np.zeros(len(logits), bool),
      target=types.SimpleNamespace(config=types.SimpleNamespace(dtype=dtype)),
    )
    column = lambda name, dtype=np.float32: np.asarray(
      [getattr(Sampling(**settings), name) or 0], dtype
    )
    params = sampling.SamplingParams(
      temperature=column("temperature"),
      top_k=column("top_k", np.int32),
      top_p=column("top_p"),
      min_p=column("min_p"),
      repetition_penalty=column("repetition_penalty"),
      draft_noise=column("draft_noise"),
    )
    key = np.asarray(sampling.row_seed(seed, 0, 0))[None]
    found = audit.audit(m, prompt, plain, other, params, key)
    return found, seen

  return go


def test_equal_answers_need_no_model(run):
  assert run(np.zeros(V), [4, 5], [4, 5]) == (None, [])


@pytest.mark.parametrize(
  ("a", "b", "at"),
  [([], [], None), ([1], [1, 2], 1), ([3, 1], [3, 2], 1), ([0], [1], 0)],
)
def test_first_difference(a, b, at):
  assert audit.first_difference(a, b) == at


def test_a_near_tie_is_excused_and_a_real_difference_is_not(run):
  logits = [0, 1, 5.0, 0, 5.0 - 5e-5, 0, 0, 0]
  found, seen = run(logits, [7, 2, 0], [7, 4, 1])
  assert (found.at, found.plain_token, found.other_token) == (1, 2, 4)
  assert found.excused
  assert found.gap == pytest.approx(5e-5, rel=0.1)
  assert seen == [[*PROMPT, 7]]  # the common prefix, teacher-forced
  logits[4] = 5.0 - 5e-3
  found, _ = run(logits, [7, 2, 0], [7, 4, 1])
  assert not found.excused
  assert found.gap == pytest.approx(5e-3, rel=0.01)


def test_bfloat16_allows_three_times_what_the_width_of_a_pass_moves(run):
  logits = np.array([0, 1, 5.0, 0, 4.9, 0, 0, 0])
  for moved, excused in ((0.05, True), (0.01, False)):
    wide = logits.copy()
    wide[1] += moved
    found, _ = run(logits, [2], [4], wide=wide)
    assert found.allowed == pytest.approx(3 * moved, rel=1e-3)
    assert found.excused == excused


def test_a_close_pair_that_is_not_the_two_best_is_no_excuse(run):
  logits = [9, 1, 5.0, 0, 5.0 - 1e-6, 0, 0, 0]
  found, _ = run(logits, [2], [4])
  assert found.gap < found.allowed
  assert not found.excused


def test_a_proper_beginning_is_never_excused(run):
  for plain, other in (([4, 5], [4]), ([4], [4, 5])):
    found, _ = run(np.zeros(V), plain, other)
    assert found.at == 1
    assert not found.excused


def test_the_penalty_counts_in_the_gap(run):
  # 3 is in the prompt: 5 / 1.25 ties with 4
  logits = [0, 0, 0, 5.0, 0, 4.0 - 2e-5, 0, 0]
  found, _ = run(logits, [3], [5], repetition_penalty=1.25)
  assert found.excused
  assert not run(logits, [3], [5])[0].excused


def test_noise_counts_in_the_gap(run):
  key = np.asarray(sampling.row_seed(5, 0, 0))[None]
  noise = np.asarray(sampling.gumbel(key, np.asarray([3]), V))[0]
  logits = -0.5 * noise  # at temperature 0.5 all decision scores tie
  logits[[2, 6]] += 3
  logits[2] += 2e-5
  found, _ = run(logits, [2], [6], seed=5, temperature=0.5)
  assert found.allowed == pytest.approx(2e-4)
  assert found.gap == pytest.approx(4e-5, rel=0.5)
  assert found.excused
  assert not run(logits, [2], [6], seed=6, temperature=0.5)[0].excused


@pytest.mark.parametrize("edge", ["top_k", "top_p", "min_p"])
def test_an_edge_of_a_cut_is_excused_only_when_it_is_close(run, edge):
  """Plain decoding cut the id that the noise likes best; the other did not."""
  key = np.asarray(sampling.row_seed(0, 0, 0))[None]
  noise = np.asarray(sampling.gumbel(key, np.asarray([3]), V))[0]
  rest, second, *_, wins = np.argsort(noise)
  for distance, excused in ((2e-5, True), (1e-2, False)):
    logits = np.full(V, -30.0)
    logits[second] = 1.0
    if edge == "top_k":
      logits[wins] = 1.0 - distance
      settings = {"top_k": 1}
    elif edge == "min_p":
      logits[wins] = 1.0 + np.log(0.5) - distance
      settings = {"min_p": 0.5}
    else:
      logits[rest] = 0.0  # {second, rest} reach p by a hair
      mass = np.exp(logits - 1.0)
      mass[wins] = 0.5 * mass[rest]
      logits[wins] = 1.0 + np.log(mass[wins])
      p = (mass[second] + mass[rest]) / mass.sum()
      settings = {"top_p": float(p * (1 - distance / 2))}
    kept = [second, rest] if edge == "top_p" else [second]
    plain = max(kept, key=lambda i: noise[i] + logits[i])
    assert noise[wins] + logits[wins] > noise[plain] + logits[plain]
    found, _ = run(
      logits, [int(plain)], [int(wins)], temperature=1.0, **settings
    )
    assert found.excused == excused, (edge, distance)


def test_the_models_own_logits_say_what_plain_decoding_decides():
  """No stand-in: every other token than plain's is a real difference."""
  engine = engines.build(None, layers=2)
  request = Request(engines.prompt(1, 5), 4, Sampling(temperature=1.0), 2)
  answer = engine.generate([request])[0].token_ids
  params = engine.sampling_of([request] * 3)
  one = sampling.SamplingParams(**{k: v[:1] for k, v in vars(params).items()})
  key = np.asarray(sampling.row_seed(2, 0, 0))[None]
  other = [*answer[:2], (answer[2] + 1) % 64, answer[3]]
  check = lambda b: audit.audit(
    engine.models, request.prompt_ids, answer, b, one, key
  )
  assert check(answer) is None
  ids = np.zeros((1, 32), np.int32)
  ids[0, : len(request.prompt_ids)] = request.prompt_ids
  one_row, wide = audit._logits(
    engine.models, ids, np.int32(len(request.prompt_ids) - 1)
  )
  np.testing.assert_allclose(one_row, wide, atol=1e-5)
  assert np.abs(one_row).max() > 0.1
  found = check(other)
  assert (found.at, found.plain_token) == (2, answer[2])
  assert found.gap > 0
  assert not found.excused
