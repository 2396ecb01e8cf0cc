"""The host side: lengths, stops, buckets, reuse, and what it compiles."""

import contextlib
import dataclasses
import itertools

import engines
import numpy as np
import pytest
import tiny

from eagle_jax import InputError, Sampling, loading
from eagle_jax.speculation import engine as module
from eagle_jax.speculation.engine import (
  Engine,
  Request,
  capacity_for,
  cut_cycles,
  prefill_plan,
  shared_slots,
  slots_needed,
)

PROMPT = engines.prompt(40, 7)
WARM = Sampling(temperature=0.8, top_k=30, draft_noise=0.5)


def ask(new):
  return Request(PROMPT, new, WARM, 8)


@pytest.fixture(scope="module")
def engine():
  return engines.build("eagle3")


@pytest.fixture(scope="module")
def answer(engine):
  """40 tokens to PROMPT; `ask` asks for fewer or more of them."""
  return engine.generate([ask(40)])[0]


@contextlib.contextmanager
def small_buckets():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, "SMALLEST_CAPACITY", 16)
    patch.setattr(module, "PREFILL_BUCKETS", (4, 8))
    yield


@pytest.fixture(scope="module")
def small(engine):
  """The same models in 60 positions, with buckets that are soon too small."""
  with small_buckets():
    e = Engine(engine.models, 3, 60)
  generate = e.generate

  def in_small_buckets(*args, **kwargs):
    with small_buckets():
      return generate(*args, **kwargs)

  e.generate = in_small_buckets
  return e


# Lengths ------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6])
def test_max_new_tokens_is_exact(engine, answer, new):
  got = engine.generate([ask(new)])[0]
  assert got.token_ids == answer.token_ids[:new]
  assert got.finish_reason == "length"
  engines.check_counts(got)


def test_rows_of_a_batch_have_their_own_lengths(engine, answer):
  got = engine.generate([ask(n) for n in (1, 9, 4)])
  assert [r.token_ids for r in got] == [answer.token_ids[:n] for n in (1, 9, 4)]


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_the_context_limit_is_reached_exactly(small, engine, room):
  """The tree has 8 nodes: more than the slots that are left."""
  ids = engines.prompt(41, 60 - room)
  got = small.generate([Request(ids, 500, WARM, 1)])[0]
  want = engine.generate([Request(ids, room, WARM, 1)])[0]
  assert got.token_ids == want.token_ids
  assert len(ids) + len(got.token_ids) == 60
  assert got.finish_reason == "length"
  engines.check_counts(got)


def test_a_growing_cache_gives_the_same_tokens(small, engine):
  requests = [
    Request(engines.prompt(50 + i, n), 45, WARM, 2, i)
    for i, n in enumerate((3, 11, 6))
  ]
  got = small.generate(requests)
  want = engine.generate(requests)
  assert [r.token_ids for r in got] == [r.token_ids for r in want]
  assert [r.accept_lengths for r in got] == [r.accept_lengths for r in want]
  capacities = {key[1] for key in small.programs if key[0] == "chunk"}
  assert len(capacities) >= 3
  assert any(key[0] == "resize" for key in small.programs)


def test_a_longer_request_after_a_short_one(small, engine):
  short, long = (
    engines.greedy([5], 2),
    engines.greedy(engines.prompt(60, 30), 25),
  )
  small.generate([short])
  got = small.generate([long])[0]
  assert got.token_ids == engine.generate([long])[0].token_ids
  assert len(got.token_ids) == 25


def test_prefill_over_several_chunks_is_the_same(small, engine):
  assert engine.models is small.models
  with small_buckets():
    assert prefill_plan(29) == [8, 8, 8, 8]
  requests = [
    Request(engines.prompt(70 + i, n), 6, WARM, 4, i)
    for i, n in enumerate((29, 5, 16))
  ]
  got = small.generate(requests)
  want = engine.generate(requests)
  assert [r.token_ids for r in got] == [r.token_ids for r in want]


def test_a_drafter_may_have_fewer_positions_than_the_context():
  target = engines.target(num_layers=2, sliding_window=None)
  full = tiny.drafter(target, "eagle")
  config = dataclasses.replace(full.config, max_positions=8)
  short = dataclasses.replace(full, config=config)
  e = Engine(loading.models(target, short, engines.DYNAMIC), 3, None)
  requests = [
    Request(engines.prompt(80 + i, 12), 20, WARM, 5, i) for i in range(3)
  ]
  got = e.generate(requests)
  want = engines.build(None, layers=2).generate(requests)
  assert [r.token_ids for r in got] == [r.token_ids for r in want]
  assert sum(sum(r.accept_lengths) for r in got) > 0


# Stops --------------------------------------------------------------------


def test_end_ids_are_a_list_and_nothing_follows_one(engine, answer):
  ids = answer.token_ids
  ends = tuple({t for t in ids if ids.index(t) >= 8})
  first = min(map(ids.index, ends))
  assert len(ends) > 1
  got = engines.with_ends(engine, ends).generate([ask(40), ask(first)])
  assert got[0].token_ids == answer.token_ids[: first + 1]
  assert got[0].finish_reason == "stop"
  assert got[1].token_ids == answer.token_ids[:first]
  assert got[1].finish_reason == "length"
  for r in got:
    engines.check_counts(r)


def test_an_end_id_as_first_token_ends_at_once(engine, answer):
  e = engines.with_ends(engine, (answer.token_ids[0],))
  got = e.generate([ask(40)])[0]
  assert got.token_ids == answer.token_ids[:1]
  assert got.accept_lengths == []
  assert got.tau is None
  assert got.finish_reason == "stop"


@pytest.mark.parametrize("keep", [1, 4, 7, 10])
def test_a_watcher_cuts_tokens_cycles_and_slots(engine, answer, keep):
  seen = []

  def watch(row, ids):
    if row == 1:
      seen.append(list(ids))
      return keep if len(ids) >= keep else None
    return None

  requests = [ask(n) for n in (15, 40, 2)]
  got = engine.generate(requests, watch, cycles=2)
  assert got[1].token_ids == answer.token_ids[:keep]
  assert got[1].finish_reason == "stop"
  assert engine._state.length[1] == len(PROMPT) + keep - 1
  assert bool(engine._state.finished[1])
  for r in got:
    engines.check_counts(r)
  # cycles before the cut one are those of the uncut answer
  n = len(got[1].accept_lengths)
  assert got[1].accept_lengths[:-1] == answer.accept_lengths[: max(n - 1, 0)]
  # the others run on, and the watcher saw every token once more each time
  assert got[0].token_ids == answer.token_ids[:15]
  assert got[2].token_ids == answer.token_ids[:2]
  assert all(a == b[: len(a)] for a, b in itertools.pairwise(seen))


# Reuse --------------------------------------------------------------------


@pytest.mark.parametrize("which", ["engine", "small"])
@pytest.mark.parametrize("cut", [None, 3])
def test_the_next_turn_of_a_chat_is_a_fresh_run(request, which, cut):
  """Also after a stop string, after other turns, and as the cache grows."""
  e = request.getfixturevalue(which)
  watch = (lambda row, ids: cut if len(ids) >= cut else None) if cut else None
  ids = [engines.prompt(90 + b, 4 + 3 * b) for b in range(3)]
  first = [Request(p, 6, WARM, 6, b) for b, p in enumerate(ids)]
  turns = [e.generate(first, watch)]
  for turn in range(2):
    ids = [
      [*p, *r.token_ids, *engines.prompt(95 + turn, 2 + b)]
      for b, (p, r) in enumerate(zip(ids, turns[-1], strict=True))
    ]
    if turn:
      ids[1] = [*ids[1][:5], 9, 9]  # an edited chat shares only its start
    turns.append(
      e.generate(
        [Request(p, 7, WARM, 6, b) for b, p in enumerate(ids)], reuse=True
      )
    )
    fresh = engines.build(None).generate(
      [Request(p, 7, WARM, 6, b) for b, p in enumerate(ids)]
    )
    assert [r.token_ids for r in turns[-1]] == [r.token_ids for r in fresh]


def test_reuse_reads_less(small):
  """A turn that shares 24 tokens needs one chunk of 4, not three of 8."""
  ids = engines.prompt(99, 22)
  first = small.generate([engines.greedy(ids, 4)])[0]
  run = []
  real = small._program

  def spy(name, *shape):
    run.append((name, *shape[1:]))
    return real(name, *shape)

  small._program = spy
  try:
    small._prepare = lambda *a: None
    small.generate([engines.greedy([*ids, *first.token_ids, 1], 2)], reuse=True)
  finally:
    del small._program, small._prepare
  assert [r[1] for r in run if r[0] == "prefill"] == [4]


@pytest.mark.parametrize(
  ("row", "prompt", "slots"),
  [
    ("abcde", "abcxy", 2),
    ("abcde", "abcde", 4),
    ("abcde", "abcdefg", 4),
    ("abcde", "abc", 2),
    ("abcde", "xbcde", 0),
    ("abcde", "a", 0),
    ("", "abc", 0),
  ],
)
def test_shared_slots(row, prompt, slots):
  assert shared_slots([*row], [*prompt]) == slots


# Programs and transfers -----------------------------------------------------


def test_one_chunk_program_serves_prompts_and_settings(engine, answer):
  settings = [
    Sampling(),
    WARM,
    Sampling(temperature=1.0, top_p=0.9, min_p=0.1),
    Sampling(repetition_penalty=1.4),
  ]
  engine.generate([Request(engines.prompt(1, 30), 4, s) for s in settings])
  before, seconds = set(engine.programs), engine.compile_seconds
  for n in (1, 8, 31):
    engine.generate([Request(engines.prompt(n, n), n, s, n) for s in settings])
  assert set(engine.programs) == before
  assert engine.compile_seconds == seconds
  assert sum(key[:2] == ("chunk", 256) for key in before) == 1


@pytest.mark.parametrize("cycles", [1, 3, module.CHUNK])
def test_one_fetch_a_chunk(engine, answer, cycles):
  before = engine.fetches
  got = engine.generate([ask(40)], cycles=cycles)[0]
  assert got.token_ids == answer.token_ids
  chunks = -(-len(got.accept_lengths) // min(cycles, module.CHUNK))
  assert engine.fetches - before == 1 + chunks


# Refusals and sums ------------------------------------------------------------


@pytest.mark.parametrize(
  ("ids", "new", "said"),
  [
    ([], 5, "empty"),
    ([1] * 256, 5, "256 tokens"),
    ([1, 64], 5, "prompt id 64 .* 0..63"),
    ([-1], 5, "prompt id -1"),
    ([1], 0, "max_new_tokens 0"),
  ],
)
def test_impossible_requests_are_refused(engine, ids, new, said):
  good = ask(5)
  with pytest.raises(InputError, match=said) as caught:
    engine.generate([good, engines.greedy(ids, new)])
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("batch", "context", "said"),
  [(0, None, "batch_size 0"), (1, 1, "context 1"), (1, 257, "257.* 256")],
)
def test_impossible_engines_are_refused(engine, batch, context, said):
  with pytest.raises(InputError, match=said):
    Engine(engine.models, batch, context)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 512, 513, 1100])
def test_prefill_plan_covers_the_prompt(tokens):
  plan = prefill_plan(tokens)
  assert sum(plan) >= tokens
  assert sum(plan[:-1]) < max(tokens, 1)
  assert set(plan) <= set(module.PREFILL_BUCKETS)


def test_capacities_are_powers_of_two_up_to_the_most():
  assert [capacity_for(n, 900) for n in (1, 256, 257, 513)] == [
    256,
    256,
    512,
    900,
  ]


def test_slots_needed_is_what_prefill_and_a_cycle_write():
  rng = np.random.default_rng(1)
  for _ in range(200):
    n = rng.integers(1, 900, 3)
    kept = rng.integers(0, n)
    plan = prefill_plan(int((n - kept).max()))
    step, most = int(rng.integers(1, 8)), 0
    for length, done in zip(n, kept, strict=True):
      for T in plan:
        most = max(most, done + T)
        done = min(done + T, length)
      most = max(most, length + step)
    got = slots_needed(plan, n.tolist(), kept.tolist(), step)
    assert got >= most
    assert got <= most + module.PREFILL_BUCKETS[-1]


def test_cut_cycles_is_cutting_the_tokens():
  rng = np.random.default_rng(0)
  for _ in range(50):
    accepts = rng.integers(0, 4, 6).tolist()
    cycle_of = [i for i, a in enumerate(accepts) for _ in range(a + 1)]
    tokens = int(rng.integers(0, len(cycle_of) + 3))
    kept = cycle_of[:tokens]
    assert cut_cycles(accepts, tokens) == [
      kept.count(i) - 1 for i in sorted(set(kept))
    ]


@pytest.mark.parametrize("cycles", [0, 33])
def test_impossible_chunks_are_refused(engine, cycles):
  with pytest.raises(ValueError, match=f"cycles {cycles}"):
    engine.generate([ask(4)], cycles=cycles)
