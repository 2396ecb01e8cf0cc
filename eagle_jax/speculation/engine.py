"""The host side of decoding: buckets, compilation, chunks, requests.

Programs are kept by their shape. `generate` compiles what a batch can reach
ahead of its clock, `serve` as it goes. Between two chunks the host reads one
small `ChunkOut` and nothing else.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import sharding
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.models import kv_cache
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


def compiler_options(backend: str) -> dict[str, str | bool]:
  """XLA options for decoding on a backend, by its JAX name.

  CPU: the YNN library that XLA prefers for matmuls takes 2.0-2.2 times as
  long as its Eigen path for 4 to 16 rows, which is what a verify pass has
  (whole pass of a 135M model on two Zen cores).
  TPU: a product with a single row (plain decoding of one request) would go to
  the vector unit, which by the compiler's own estimate takes 3.5 times as
  long as the matrix unit does for the same weights.
  """
  return {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "tpu": {"xla_tpu_enable_dot_strength_reduction": False},
  }.get(backend, {})


def capacity_for(slots: int, most: int) -> int:
  """The smallest power-of-two bucket, but not above `most`."""
  capacity = SMALLEST_CAPACITY
  while capacity < slots:
    capacity *= 2
  return min(capacity, most)


def prefill_plan(tokens: int) -> list[int]:
  """Chunk lengths that cover so many tokens, large ones first.

  700 tokens: 512 128 32 32 (704), buckets 32, 128 and 512.
  """
  smallest = PREFILL_BUCKETS[0]
  rest = max(-(-tokens // smallest), 1) * smallest
  plan = []
  for bucket in reversed(PREFILL_BUCKETS):
    plan += [bucket] * (rest // bucket)
    rest %= bucket
  return plan


def slots_needed(
  plan: Sequence[int], lengths: Sequence[int], kept: Sequence[int], step: int
) -> int:
  """Cache slots that prefill and the first cycle may write.

  A chunk writes its whole length behind every row, also behind rows whose
  prompt ended earlier; a cycle writes `step` slots behind the prompt:

    kept 0, length 40, plan 32 32    0 |--32--|--32--| 64
    kept 0, length 10                0 |--10--|--32--| 42, never past 64

  Args:
    lengths, kept: tokens of each row's prompt, and those already committed.
  """
  total, largest = sum(plan), max(plan)
  rows = zip(lengths, kept, strict=True)
  written = max(min(k + total, n + largest) for n, k in rows)
  return max(written, max(lengths) + step)


@dataclasses.dataclass
class _Row:
  """A request under way in a running batch; times are of perf_counter."""

  request: Request
  tokens: list[int]
  accepts: list[int]
  finished: bool  # by its first token
  began: float
  prefilled: float

  def result(self, ends: np.ndarray) -> Result:
    now = time.perf_counter()
    return Result(
      self.tokens,
      self.accepts,
      "stop" if ends[self.tokens[-1]] else "length",
      now - self.began,
      now - self.prefilled,
    )


class Engine:
  """Decodes batches of requests with one set of `Models`.

  compile_seconds and programs tell what was compiled; `fetches` counts the
  device-to-host transfers; `most` is the largest capacity of the caches. Where
  the models lie on a mesh, so does the state, its rows shared out over the data
  axis.
  """

  def __init__(self, models: Models, batch_size: int, context: int | None):
    limit = models.target.config.max_positions
    if context is not None and not 2 <= context <= limit:
      raise InputError(
        f"context {context} must be from 2 to the target's {limit} positions"
      )
    if batch_size < 1:
      raise InputError(f"batch_size {batch_size} must be at least 1")
    if models.mesh is not None:
      sharding.check_batch(models.mesh, batch_size)
    self.models = models
    self.batch_size = batch_size
    self.context = context or limit
    self.step = models.spec.levels + 1
    self.compile_seconds = 0.0
    self.programs: dict[tuple, object] = {}
    self.fetches = 0
    self._width = self.context + max(PREFILL_BUCKETS[-1], self.step) + 2
    self.most = self.context + max(self.step, PREFILL_BUCKETS[-1])
    self._ends = np.asarray(models.ends)
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
    # Where the results lie; without a mesh that is the one device.
    to_state, to_host, to_both = {}, {}, {}
    put = lambda a: a
    if m.mesh is not None:
      everywhere = sharding.replicated(m.mesh)
      rows = sharding.decode_state(state, m, m.mesh)
      to_state = {"out_shardings": rows}
      to_host = {"out_shardings": everywhere}
      to_both = {"out_shardings": (rows, everywhere)}
      state = sharding.shapes(state, rows)
      put = lambda a: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=everywhere
      )
    row = put(jax.ShapeDtypeStruct((B,), jnp.int32))
    flag = put(jax.ShapeDtypeStruct((B,), bool))
    scalar = put(jax.ShapeDtypeStruct((), jnp.int32))
    if name == "init":
      make = functools.partial(
        states.init_state, B=B, width=self._width, capacity=capacity
      )
      lowered = jax.jit(make, **to_state).lower(m)
    elif name == "chunk":
      lowered = jax.jit(
        functools.partial(decoding.run_chunk, size=CHUNK),
        donate_argnums=1,
        **to_both,
      ).lower(m, state, scalar)
    elif name == "prefill":
      lowered = jax.jit(
        functools.partial(decoding.prefill, T=static[0]),
        donate_argnums=1,
        **to_state,
      ).lower(m, state, row, flag)
    elif name == "begin":
      tokens, seeds = put(state.tokens), put(state.seeds)
      sampling = jax.tree.map(put, state.sampling)
      lowered = jax.jit(states.begin, donate_argnums=1, **to_state).lower(
        m, state, tokens, row, row, seeds, sampling, row
      )
    elif name == "resize":
      lowered = jax.jit(
        functools.partial(states.resize, capacity=static[0]), **to_state
      ).lower(state)
    elif name == "look":
      lowered = jax.jit(states.look, **to_host).lower(state)
    elif name == "grow":  # to look at; a cycle grows its own
      lowered = jax.jit(decoding.grow, **to_host).lower(m, state)
    elif name == "stop":
      lowered = jax.jit(states.stop_rows, donate_argnums=0, **to_state).lower(
        state, flag, row
      )
    elif name == "put":
      one = jax.eval_shape(
        functools.partial(states.init_state, m, 1, self._width, static[0])
      )
      lowered = jax.jit(states.put_row, donate_argnums=0).lower(
        state, one, scalar
      )
    else:
      raise AssertionError(name)
    self.programs[key] = lowered.compile(
      compiler_options(jax.default_backend())
    )
    self.compile_seconds += time.perf_counter() - began
    return self.programs[key]

  def _capacities(self, first: int, last: int) -> list[int]:
    """All buckets from the one that holds `first` slots to `last` slots."""
    found = [capacity_for(first, self.most)]
    while found[-1] < last:
      found.append(capacity_for(found[-1] + 1, self.most))
    return found

  def _prepare(
    self, plan: list[int], first: int, last: int, watch, watch_trees
  ) -> None:
    """Compile all that a batch can reach."""
    capacities = self._capacities(first, last)
    self._prepare_prefill(plan, capacities[0])
    for i, capacity in enumerate(capacities):
      self._program("chunk", capacity)
      if watch:
        self._program("stop", capacity)
      if watch_trees:
        self._program("grow", capacity)
      if i:
        self._program("resize", capacities[i - 1], capacity)

  def _prepare_prefill(self, plan: list[int], capacity: int) -> None:
    for name in ("init", "begin", "look"):
      self._program(name, capacity)
    for T in sorted(set(plan)):
      self._program("prefill", capacity, T)

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
    if not 1 <= cycles <= CHUNK:
      raise ValueError(f"cycles {cycles} must be from 1 to {CHUNK}")
    for request in requests:
      self.check(request)
    results: list[Result] = []
    for at in range(0, len(requests), self.batch_size):
      group = requests[at : at + self.batch_size]
      results += self._batch(group, watch, at, cycles, reuse, watch_trees)
    return results

  def _batch(
    self, group, watch, offset, cycles, reuse, watch_trees
  ) -> list[Result]:
    m = self.models
    lengths = [len(r.prompt_ids) for r in group]
    limits = [
      min(n + r.max_new_tokens, self.context)
      for n, r in zip(lengths, group, strict=True)
    ]
    kept = [0] * len(group)
    reuse = reuse and self._state is not None
    if reuse:
      kept = [
        shared_slots(self._rows[b], r.prompt_ids) for b, r in enumerate(group)
      ]
    plan = prefill_plan(max(n - k for n, k in zip(lengths, kept, strict=True)))
    first = slots_needed(plan, lengths, kept, self.step)
    held = kv_cache.capacity(self._state.cache) if reuse else 0
    capacity = capacity_for(max(first, held), self.most)
    last = max(max(limits) - 1 + self.step, capacity)
    self._prepare(plan, capacity, last, watch, watch_trees)
    if held and capacity > held:
      self._program("resize", held, capacity)
    seeds = self.seeds_of(group)

    began = time.perf_counter()
    state, self._state = self._state, None  # donated, or freed, from here on
    if not reuse:
      del state
      state = self._program("init", capacity)(m)
    elif capacity > held:
      state = self._program("resize", held, capacity)(state)
    state = self._prefill(state, group, plan, kept, limits, seeds)
    return self._decode(
      state, group, lengths, watch, offset, cycles, began, watch_trees
    )

  def _prefill(
    self,
    state: DecodeState,
    group: Sequence[Request],
    plan: list[int],
    kept: list[int],
    limits: list[int],
    seeds: np.ndarray,
  ) -> DecodeState:
    """The state with the group's prompts committed and their roots drawn."""
    B, m = self.batch_size, self.models
    capacity = kv_cache.capacity(state.cache)
    lengths = [len(r.prompt_ids) for r in group]
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
      seeds,
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
    return state

  def _decode(
    self, state, group, lengths, watch, offset, cycles, began, watch_trees
  ) -> list[Result]:
    m = self.models
    tokens: list[list[int]] = []
    accepts: list[list[int]] = [[] for _ in group]
    stopped = [False] * len(group)
    capacity = kv_cache.capacity(state.cache)
    # No cycle yet: the first read brings the tokens that prefill gave.
    out = self._fetch(self._program("look", capacity)(state))
    prefilled = time.perf_counter()
    for b in range(len(group)):
      tokens.append(out.tokens[b].tolist())
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
        larger = capacity_for(int(out.length.max()) + self.step, self.most)
        state = self._program("resize", capacity, larger)(state)
        capacity = larger
      if watch_trees:
        cycles = 1
        drafted = self._fetch(self._program("grow", capacity)(m, state))
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
    return [
      Result(
        tokens[b],
        accepts[b],
        "stop" if stopped[b] or self._ends[tokens[b][-1]] else "length",
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

  # A running batch --------------------------------------------------------

  @functools.cached_property
  def single(self) -> "Engine":
    """The engine that prefills one row for `serve`."""
    return Engine(self.models, 1, self.context)

  def serve(
    self, source: Callable[[], Request | None], cycles: int
  ) -> Iterator[tuple[Request, Result]]:
    """Decode requests as they come; a row that ends is filled at once.

      row 0   A A A A A A D D D D ...
      row 1   B B B C C C C C C C ...

    A prompt is prefilled alone, in a state of one row, which then takes the
    place of the one that ended: running rows do not notice, and a row gives
    the tokens it gives alone.

    Args:
      source: the next request, or None while there is none. It is asked
        whenever a row is free, also after a result was yielded, so that a
        request may be made of an answer.
      cycles: between two looks at the rows, from 1 to CHUNK; a row that ended
        waits for the next look.

    Yields:
      each request with its result, when it ends. `seconds` run from its
      prefill on, the rows beside it included.
    """
    if not 1 <= cycles <= CHUNK:
      raise ValueError(f"cycles {cycles} must be from 1 to {CHUNK}")
    if self.models.mesh is not None:
      raise InputError("a running batch is for one device: leave out the mesh")
    B, m = self.batch_size, self.models
    rows: list[_Row | None] = [None] * B
    lengths = np.zeros(B, np.int64)  # also of rows that ended
    state, capacity = None, 0
    while True:
      for b in range(B):
        while rows[b] is None and (request := source()) is not None:
          one, row = self.single.open(request)
          if row.finished:
            yield request, row.result(self._ends)
            continue
          needed = kv_cache.capacity(one.cache)
          if state is None:
            capacity = needed
            state = self._program("init", capacity)(m)
          elif needed > capacity:
            state = self._program("resize", capacity, needed)(state)
            capacity = needed
          state = self._program("put", capacity, needed)(
            state, one, np.int32(b)
          )
          rows[b], lengths[b] = row, len(request.prompt_ids)
      live = np.asarray([row is not None for row in rows])
      if not live.any():
        return
      fitting = capacity_for(int(lengths[live].max()) + self.step, self.most)
      if int(lengths.max()) + self.step > fitting:
        # a cycle writes behind rows that ended, too
        state = self._program("stop", capacity)(
          state, ~live, np.zeros(B, np.int32)
        )
        lengths[~live] = 0
      if fitting != capacity:
        state = self._program("resize", capacity, fitting)(state)
        capacity = fitting
      chunk = self._program("chunk", capacity)
      state, out = chunk(m, state, np.int32(cycles))
      out = self._fetch(out)
      lengths[:] = out.length
      for b, row in enumerate(rows):
        if row is None:
          continue
        row.tokens += out.tokens[b, : out.count[b]].tolist()
        row.accepts += out.accept_lengths[b, : out.cycles[b]].tolist()
        if out.finished[b]:
          rows[b] = None
          yield row.request, row.result(self._ends)

  def open(self, request: Request) -> tuple[DecodeState, "_Row"]:
    """One request prefilled, in an engine of one row, and its first token."""
    self.check(request)
    n = len(request.prompt_ids)
    plan = prefill_plan(n)
    capacity = capacity_for(slots_needed(plan, [n], [0], self.step), self.most)
    self._prepare_prefill(plan, capacity)
    began = time.perf_counter()
    limit = min(n + request.max_new_tokens, self.context)
    state = self._prefill(
      self._program("init", capacity)(self.models),
      [request],
      plan,
      [0],
      [limit],
      self.seeds_of([request]),
    )
    out = self._fetch(self._program("look", capacity)(state))
    return state, _Row(
      request,
      out.tokens[0].tolist(),
      [],
      bool(out.finished[0]),
      began,
      time.perf_counter(),
    )

  # Transfers -------------------------------------------------------------

  def _fetch(self, out):
    """The one place where a chunk's results are read from the device."""
    self.fetches += 1
    return jax.device_get(out)

  def seeds_of(self, group: Sequence[Request]) -> np.ndarray:
    """uint32[B, 2], the rows' noise keys; empty rows get zeros."""
    made = [row_seed(r.seed, r.number, r.sample) for r in group]
    seeds = np.zeros((self.batch_size, 2), np.uint32)
    seeds[: len(group)] = jax.device_get(made)
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
      draft_noise=column((s.strength(calibrated) for s in rows), np.float32),
    )
