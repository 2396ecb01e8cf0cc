"""The host side of decoding: buckets, compilation, chunks, requests.

Every program is compiled ahead of the request's clock and kept by its shape;
between two chunks the host reads one small `ChunkOut` and nothing else.
"""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.speculation import decoding
from eagle_jax.speculation import state as states
from eagle_jax.speculation.requests import (
  Request,
  Result,
  cut_cycles,
  shared_slots,
)
from eagle_jax.speculation.sampling import SamplingParams, row_seed
from eagle_jax.speculation.state import ChunkOut, DecodeState, Models
from eagle_jax.speculation.tree import Tree

# Prefill runs in chunks of the last bucket; the rest is padded to a bucket.
PREFILL_BUCKETS = (32, 128, 512)
SMALLEST_CAPACITY = 256
CHUNK = 32  # cycles in one device program at most


# Called with the row and all its new tokens so far; a number cuts the row to
# that many tokens and stops it.
Watch = Callable[[int, list[int]], int | None]
# Called after each cycle with the draft trees and the chunk that verified them.
WatchTrees = Callable[[Tree, ChunkOut], None]


def compiler_options() -> dict[str, str]:
  """XLA options for decoding on the backend at hand.

  CPU: the YNN library that XLA prefers for matmuls takes 2.0-2.2 times as
  long as its Eigen path for 4 to 16 rows, which is what a verify pass has
  (whole pass of a 135M model on two Zen cores).
  """
  if jax.default_backend() == "cpu":
    return {"xla_cpu_experimental_ynn_fusion_type": ""}
  return {}


def capacity_for(slots: int, most: int) -> int:
  """The smallest power-of-two bucket, but not above `most`."""
  capacity = SMALLEST_CAPACITY
  while capacity < slots:
    capacity *= 2
  return min(capacity, max(most, slots))


def prefill_plan(tokens: int) -> list[int]:
  """Chunk lengths that cover so many tokens."""
  largest = PREFILL_BUCKETS[-1]
  plan = [largest] * (tokens // largest)
  rest = tokens % largest
  if rest or not plan:
    plan.append(next(b for b in PREFILL_BUCKETS if b >= rest))
  return plan


class Engine:
  """Decodes batches of requests with one set of `Models`.

  compile_seconds and programs tell what was compiled; `fetches` counts the
  device-to-host transfers.
  """

  def __init__(self, models: Models, batch_size: int, context: int | None):
    limit = models.target.config.max_positions
    if context is not None and not 2 <= context <= limit:
      raise InputError(
        f"context {context} must be from 2 to the target's {limit} positions"
      )
    if batch_size < 1:
      raise InputError(f"batch_size {batch_size} must be at least 1")
    self.models = models
    self.batch_size = batch_size
    self.context = context or limit
    self.step = models.spec.levels + 1
    self.compile_seconds = 0.0
    self.programs: dict[tuple, object] = {}
    self.fetches = 0
    self._width = self.context + max(PREFILL_BUCKETS[-1], self.step) + 2
    self._most = self.context + max(self.step, PREFILL_BUCKETS[-1])
    self._state: DecodeState | None = None
    self._rows: list[list[int]] = [[] for _ in range(batch_size)]

  # Compilation -----------------------------------------------------------

  def _program(self, name: str, capacity: int, *static: int):
    """The compiled function for a capacity, compiled when first asked for."""
    key = (name, capacity, *static)
    if key in self.programs:
      return self.programs[key]
    began = time.perf_counter()
    m, B = self.models, self.batch_size
    state = jax.eval_shape(
      functools.partial(states.init_state, m, B, self._width, capacity)
    )
    row = jax.ShapeDtypeStruct((B,), jnp.int32)
    flag = jax.ShapeDtypeStruct((B,), bool)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    if name == "init":
      make = functools.partial(
        states.init_state, B=B, width=self._width, capacity=capacity
      )
      lowered = jax.jit(make).lower(m)
    elif name == "chunk":
      lowered = jax.jit(
        functools.partial(decoding.run_chunk, size=CHUNK), donate_argnums=1
      ).lower(m, state, scalar)
    elif name == "prefill":
      lowered = jax.jit(
        functools.partial(decoding.prefill, T=static[0]), donate_argnums=1
      ).lower(m, state, row, flag)
    elif name == "begin":
      tokens, seeds = state.tokens, state.seeds
      lowered = jax.jit(states.begin, donate_argnums=1).lower(
        m, state, tokens, row, row, seeds, state.sampling, row
      )
    elif name == "resize":
      lowered = jax.jit(
        functools.partial(states.resize, capacity=static[0])
      ).lower(state)
    elif name == "grow":  # to look at; a cycle grows its own
      lowered = jax.jit(decoding.grow).lower(m, state)
    elif name == "stop":
      lowered = jax.jit(states.stop_rows, donate_argnums=0).lower(
        state, flag, row
      )
    else:
      raise AssertionError(name)
    self.programs[key] = lowered.compile(compiler_options())
    self.compile_seconds += time.perf_counter() - began
    return self.programs[key]

  def _capacities(self, first: int, last: int) -> list[int]:
    """All buckets from the one that holds `first` slots to `last` slots."""
    found = [capacity_for(first, self._most)]
    while found[-1] < last:
      found.append(capacity_for(found[-1] + 1, self._most))
    return found

  def _prepare(self, plan: list[int], first: int, last: int) -> None:
    """Compile all that a batch can reach."""
    capacities = self._capacities(first, last)
    start = capacities[0]
    self._program("init", start)
    self._program("begin", start)
    for T in sorted(set(plan)):
      self._program("prefill", start, T)
    for i, capacity in enumerate(capacities):
      self._program("chunk", capacity)
      if i:
        self._program("resize", capacities[i - 1], capacity)

  # Requests --------------------------------------------------------------

  def check(self, request: Request) -> None:
    """Refuses a request that cannot be decoded."""
    n, V = len(request.prompt_ids), self.models.target.config.vocab_size
    if n < 1:
      raise InputError("the prompt is empty: give at least one token")
    if n >= self.context:
      raise InputError(
        f"the prompt has {n} tokens, the context holds {self.context} and an"
        " answer needs at least one: shorten the prompt"
      )
    bad = [i for i in request.prompt_ids if not 0 <= i < V]
    if bad:
      raise InputError(
        f"prompt id {bad[0]} is outside the target's vocabulary 0..{V - 1}"
      )
    if request.max_new_tokens < 1:
      raise InputError(
        f"max_new_tokens {request.max_new_tokens} must be at least 1"
      )

  def generate(
    self,
    requests: Sequence[Request],
    watch: Watch | None = None,
    cycles: int = CHUNK,
    reuse: bool = False,
    watch_trees: WatchTrees | None = None,
  ) -> list[Result]:
    """Decode all requests, `batch_size` at a time.

    Args:
      watch: sees each row's tokens after every chunk (streaming, stop
        strings); rows are numbered as in `requests`.
      cycles: most cycles between two looks, from 1 to CHUNK.
      reuse: keep the leading tokens that a row's new prompt shares with what
        the row holds from the call before (the next turn of a chat).
      watch_trees: sees every draft tree; drafts are then grown twice and read
        each cycle, which is slow.
    """
    for request in requests:
      self.check(request)
    results: list[Result] = []
    for at in range(0, len(requests), self.batch_size):
      group = requests[at : at + self.batch_size]
      results += self._batch(
        group, watch, at, max(1, min(cycles, CHUNK)), reuse, watch_trees
      )
    return results

  def _batch(
    self, group, watch, offset, cycles, reuse, watch_trees
  ) -> list[Result]:
    B, m = self.batch_size, self.models
    lengths = [len(r.prompt_ids) for r in group]
    limits = [
      min(n + r.max_new_tokens, self.context)
      for n, r in zip(lengths, group, strict=True)
    ]
    kept = [0] * len(group)
    if reuse and self._state is not None:
      kept = [
        shared_slots(self._rows[b], r.prompt_ids) for b, r in enumerate(group)
      ]
    plan = prefill_plan(max(n - k for n, k in zip(lengths, kept, strict=True)))
    # A chunk writes its whole length behind every row.
    first = max(max(lengths), max(kept)) + max(sum(plan), self.step)
    first = min(first, max(kept) + sum(plan) + self.step)
    last = max(max(limits) - 1 + self.step, first)
    if reuse and self._state is not None:
      held = self._state.cache[0].k.shape[2]
      first = max(first, held)
    capacity = capacity_for(first, self._most)
    self._prepare(plan, first, max(last, first))
    if reuse and self._state is not None and capacity > held:
      self._program("resize", held, capacity)

    began = time.perf_counter()
    if not reuse or self._state is None:
      state = self._program("init", capacity)(m)
    else:
      state = self._state
      if capacity > held:
        state = self._program("resize", held, capacity)(state)
    self._state = None  # donated from here on
    prompts = np.zeros((B, self._width), np.int32)
    for b, r in enumerate(group):
      prompts[b, : lengths[b]] = r.prompt_ids
    row = lambda values, dtype=np.int32: np.asarray(
      list(values) + [0] * (B - len(group)), dtype
    )
    state = self._program("begin", capacity)(
      m,
      state,
      prompts,
      row(lengths),
      row(kept),
      self.seeds_of(group),
      self.sampling_of(group),
      row(limits),
    )
    done = list(kept)
    for T in plan:
      count = [min(T, n - d) for n, d in zip(lengths, done, strict=True)]
      done = [d + c for d, c in zip(done, count, strict=True)]
      last_chunk = [
        c > 0 and d == n for c, d, n in zip(count, done, lengths, strict=True)
      ]
      state = self._program("prefill", capacity, T)(
        m, state, row(count), row(last_chunk, bool)
      )
    return self._decode(
      state, group, lengths, watch, offset, cycles, began, watch_trees
    )

  def _decode(
    self, state, group, lengths, watch, offset, cycles, began, watch_trees
  ) -> list[Result]:
    m = self.models
    tokens: list[list[int]] = []
    accepts: list[list[int]] = [[] for _ in group]
    stopped = [False] * len(group)
    live = True
    prefilled = None
    capacity = state.cache[0].k.shape[2]
    # No cycle yet: the first read brings the tokens that prefill gave.
    roots, out = self._first(state)
    prefilled = time.perf_counter()
    for b in range(len(group)):
      tokens.append([int(roots[b])])
    while True:
      cut = self._look(group, watch, offset, tokens, accepts, stopped)
      if cut:
        keep = np.zeros(self.batch_size, np.int32)
        mark = np.zeros(self.batch_size, bool)
        for b in cut:
          mark[b], keep[b] = True, lengths[b] + len(tokens[b]) - 1
        state = self._program("stop", capacity)(state, mark, keep)
      live = [
        b for b in range(len(group)) if not (stopped[b] or out.finished[b])
      ]
      if not live:
        break
      if int(out.length.max()) + self.step > capacity:
        larger = capacity_for(int(out.length.max()) + self.step, self._most)
        state = self._program("resize", capacity, larger)(state)
        capacity = larger
      if watch_trees:
        cycles = 1
        drafted = jax.device_get(self._program("grow", capacity)(m, state))
      state, out = self._program("chunk", capacity)(m, state, np.int32(cycles))
      out = self._fetch(out)
      if watch_trees:
        watch_trees(drafted, out)
      for b in range(len(group)):
        if not stopped[b]:
          tokens[b] += out.tokens[b, : out.count[b]].tolist()
          accepts[b] += out.accept_lengths[b, : out.cycles[b]].tolist()
    ended = time.perf_counter()
    self._state = state
    self._rows = [
      [*r.prompt_ids, *t] for r, t in zip(group, tokens, strict=True)
    ] + [[] for _ in range(self.batch_size - len(group))]
    ends = self._ends()
    return [
      Result(
        tokens[b],
        accepts[b],
        "stop" if stopped[b] or ends[tokens[b][-1]] else "length",
        ended - began,
        ended - prefilled,
      )
      for b in range(len(group))
    ]

  def _look(self, group, watch, offset, tokens, accepts, stopped) -> list[int]:
    """Show new tokens; the rows that the watcher cut now."""
    if watch is None:
      return []
    cut = []
    for b in range(len(group)):
      if stopped[b]:
        continue
      keep = watch(offset + b, tokens[b])
      if keep is not None:
        stopped[b] = True
        tokens[b] = tokens[b][:keep]
        accepts[b] = cut_cycles(accepts[b], keep - 1)
        cut.append(b)
    return cut

  # Transfers -------------------------------------------------------------

  def _fetch(self, out: ChunkOut) -> ChunkOut:
    """The one place where decoding waits for the device."""
    self.fetches += 1
    return jax.device_get(out)

  def _first(self, state: DecodeState) -> tuple[np.ndarray, ChunkOut]:
    root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
    none = jnp.zeros((self.batch_size, 0), jnp.int32)
    out = ChunkOut(
      root, none, none, none, state.length + 0, state.finished | False
    )
    out = self._fetch(out)
    return out.tokens[:, 0], out

  @functools.cache  # noqa: B019 (an engine lives as long as the program)
  def _ends(self) -> np.ndarray:
    return np.asarray(self.models.ends)

  def seeds_of(self, group: Sequence[Request]) -> np.ndarray:
    """uint32[B, 2], the rows' noise keys; empty rows get zeros."""
    seeds = np.zeros((self.batch_size, 2), np.uint32)
    for b, r in enumerate(group):
      seeds[b] = np.asarray(row_seed(r.seed, r.number, r.sample))
    return seeds

  def sampling_of(self, group: Sequence[Request]) -> SamplingParams:
    """The rows' sampling parameters; empty rows are greedy."""
    B = self.batch_size
    drafter = self.models.drafter
    calibrated = drafter.config.draft_noise if drafter is not None else 0.0
    rows = [r.sampling for r in group] + [Sampling()] * (B - len(group))
    column = lambda values, dtype: np.asarray(list(values), dtype)
    return SamplingParams(
      temperature=column((s.temperature for s in rows), np.float32),
      top_k=column((s.top_k for s in rows), np.int32),
      top_p=column((s.top_p for s in rows), np.float32),
      min_p=column((s.min_p for s in rows), np.float32),
      repetition_penalty=column(
        (s.repetition_penalty for s in rows), np.float32
      ),
      draft_noise=column(
        (calibrated if s.draft_noise is None else s.draft_noise for s in rows),
        np.float32,
      ),
    )
