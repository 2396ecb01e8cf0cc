"""Engines around tiny models: built once a process, compiled cheaply."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from eagle_jax import Sampling, loading
from eagle_jax.speculation import audit, sampling, tree
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request

DYNAMIC = tree.dynamic(10, 3, 2)  # most of its pool: all levels occur


@pytest.fixture(scope="module", autouse=True)
def unoptimised():
  """For files of many small programs: XLA's own passes are left out, too
  (conftest.FAST leaves out LLVM's).

  Import it into a test file to use it there.
  """
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def target(**changes):
  return tiny.target(**changes)


@functools.cache
def build(
  kind: str | None,
  spec: tree.TreeSpec = DYNAMIC,
  B: int = 3,
  context: int | None = None,
  lazy_head: bool = True,
  layers: int = 8,
  window: int | None = None,
  variant: str | None = None,
  experts: tuple = (),
) -> Engine:
  """kind None: plain decoding. variant: one of tiny.VARIANTS."""
  t = target(num_layers=layers, sliding_window=window, **dict(experts))
  changes = {"taps": (0, 1, 2), **tiny.VARIANTS[variant]} if variant else {}
  drafter = tiny.drafter(t, kind, **changes) if kind else None
  m = loading.models(t, drafter, spec if kind else tree.plain())
  return Engine(m.replace(lazy_head=lazy_head), B, context)


def with_ends(e: Engine, ends: tuple[int, ...]) -> Engine:
  """The same engine with end ids, which are data: nothing compiles anew."""
  mask = np.zeros(e.models.ends.shape[0], bool)
  mask[list(ends)] = True
  other = Engine(e.models.replace(ends=mask), e.batch_size, e.context)
  other.programs = e.programs
  return other


def prompt(seed: int, n: int) -> list[int]:
  return np.random.default_rng(seed).integers(0, tiny.V, n).tolist()


def prefilled(e: Engine, requests: list[Request], chunks: list[int]):
  """The state after prefill, in a cache of 256 slots."""
  m, B = e.models, e.batch_size
  n = np.asarray([len(r.prompt_ids) for r in requests], np.int32)
  tokens = np.zeros((B, e._width), np.int32)
  for b, r in enumerate(requests):
    tokens[b, : n[b]] = r.prompt_ids
  seeds = np.stack(
    [sampling.row_seed(r.seed, r.number, r.sample) for r in requests]
  )
  limit = n + np.asarray([r.max_new_tokens for r in requests], np.int32)
  state = e._program("begin", 256)(
    m,
    e._program("init", 256)(m),
    tokens,
    n,
    0 * n,
    seeds,
    e.sampling_of(requests),
    limit,
  )
  done = 0 * n
  for T in chunks:
    count = np.minimum(n - done, T)
    done = done + count
    state = e._program("prefill", 256, T)(
      m, state, count, (count > 0) & (done == n)
    )
  return state


def check_equal(e: Engine, requests, plain, other) -> int:
  """Same tokens row for row; how many rows a near tie excused."""
  excused = 0
  for r, a, b in zip(requests, plain, other, strict=True):
    params = jax.tree.map(lambda x: x[:1], e.sampling_of([r]))
    seed = np.asarray(sampling.row_seed(r.seed, r.number, r.sample))[None]
    found = audit.audit(
      e.models, r.prompt_ids, a.token_ids, b.token_ids, params, seed
    )
    assert found is None or found.excused, (r.sampling, found)
    excused += found is not None
  return excused


def check_counts(result) -> None:
  """Each cycle gives its accepted drafts and one token of the target."""
  n = len(result.token_ids)
  assert sum(a + 1 for a in result.accept_lengths) == n - 1
  cycles = len(result.accept_lengths)
  assert result.tau == ((n - 1) / cycles if cycles else None)


def greedy(prompt_ids, new: int, **changes) -> Request:
  return dataclasses.replace(Request(prompt_ids, new, Sampling()), **changes)
