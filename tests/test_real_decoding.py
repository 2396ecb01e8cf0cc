"""The shipped target and drafter: the same tokens as plain decoding.

Prompts and lengths are small here; `python -m eagle_jax.bench` checks the same
on whole suites ("diverged").
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from eagle_jax import Sampling, choice, generation, loading
from eagle_jax.errors import InputError
from eagle_jax.generation import Generator
from eagle_jax.speculation import engine
from eagle_jax.speculation.requests import Request

PROMPTS = (
  "Why is the sky blue?",
  "Write a Python function that adds two numbers.",
  "A box has 3 red and 4 blue balls. How many balls are in two such boxes?",
)
SAMPLINGS = (
  Sampling(),
  Sampling(1.0, top_p=0.95, draft_noise=0.0),
  Sampling(1.0, top_p=0.95, draft_noise=0.5),
  Sampling(0.7, top_k=50, min_p=0.02, repetition_penalty=1.2),
)


@pytest.fixture(scope="module", autouse=True)
def optimised():
  """The programs that users run (conftest.FAST)."""
  ours = engine.compiler_options("cpu") | {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine, "compiler_options", lambda backend: ours)
    yield


@pytest.fixture(scope="module")
def target():
  try:
    generation.use_compilation_cache()
    return loading.load_target(loading.DEFAULT_TARGET, "float32", print)
  except InputError as e:
    if "could not be fetched" in str(e):
      pytest.skip(str(e))
    raise


@pytest.fixture(scope="module")
def drafter(target):
  return loading.load_drafter(loading.DEFAULT_DRAFTER, target, print)


@pytest.fixture(scope="module")
def requests(target):
  encode = Generator(target, None, "plain").encode
  return [
    Request(encode(p), 24, s, seed=7, number=i)
    for s in SAMPLINGS
    for i, p in enumerate(PROMPTS)
  ]


@pytest.fixture(scope="module")
def plain(target, requests):
  """One row at a time."""
  generator = Generator(target, None, "plain")
  return generator, generator.run(requests, [""] * len(requests))


def excused(plain, base, other):
  """Equal, or apart by a near tie, which is printed."""
  found = [
    generation.divergence(plain, a, b) for a, b in zip(base, other, strict=True)
  ]
  apart = [d for d in found if d is not None]
  for d in apart:
    print(d)
  assert all(d.excused for d in apart)
  return len(apart)


def test_eagle_gives_plain_tokens(target, drafter, requests, plain):
  generator, base = plain
  eagle = Generator(target, drafter)
  answers = eagle.run(requests, [""] * len(requests))
  assert excused(generator, base, answers) <= 1
  cycles = sum(len(a.result.accept_lengths) for a in answers)
  tokens = sum(len(a.result.token_ids) - 1 for a in answers)
  assert tokens / cycles > 1.3  # a real drafter, not luck


def test_a_batch_gives_the_rows_alone(target, drafter, requests, plain):
  generator, base = plain
  eagle = Generator(target, drafter, batch_size=len(requests))
  answers = eagle.run(requests, [""] * len(requests))
  assert excused(generator, base, answers) <= 1


@pytest.mark.parametrize("name", loading.shipped())
def test_what_its_trees_are_worth_was_measured_on_this_drafter(target, name):
  """Whatever dtype it runs in, `--tree auto` knows the file for its own."""
  drafter = loading.load_drafter(name, target, print)
  kept = drafter.notes["acceptance"]
  assert kept["drafter"] == choice.drafter_fingerprint(drafter)
  cast = dataclasses.replace(
    drafter,
    config=dataclasses.replace(drafter.config, dtype="bfloat16"),
    params=jax.tree.map(lambda a: a.astype(jnp.bfloat16), drafter.params),
  )
  assert kept["drafter"] == choice.drafter_fingerprint(cast)
  # more nodes are worth more, and a tree more than a chain
  assert kept["sampled"]["draft_noise"] == drafter.config.draft_noise > 0
  for tau in (kept["tau"], kept["sampled"]["tau"]):
    assert 1 < tau["chain::3"] < tau["dynamic:6:3:3"] < tau["dynamic:60:6:10"]
