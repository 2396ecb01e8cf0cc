"""How much of a decode cycle is not the two networks' arithmetic.

Parts that are timed alone do not tell: each has its own dispatch, and finds
other data in the caches. So the networks of a cycle run in a loop of their
own, with the shapes of the cycle and nothing between them, in turn with real
answers. What a cycle takes beyond that is choosing, building and walking the
tree, drawing, committing, and the host.
"""

import functools
import itertools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.bench import measure
from eagle_jax.models import masks
from eagle_jax.models.kv_cache import KV
from eagle_jax.speculation import decoding, engine, tree
from eagle_jax.speculation import state as states
from eagle_jax.speculation.requests import Request, Result
from eagle_jax.speculation.state import DecodeState, Models

LOOPS = 16  # cycles whose networks one call runs
LEAST = 3  # answers, for an interval


def networks(m: Models, state: DecodeState, accepts: jax.Array) -> jax.Array:
  """The networks' passes of some cycles, and (almost) only those.

    cycle   grow          verify         accept      commit  extend
    here    draft passes  target over M  head rows,  -       drafter over
            and heads     rows, head     where lazy          L + 1 rows, head

  A maximum of each pass's scores joins the result, and each loop feeds on the
  one before (feature, token ids), or the compiler would take passes out.

  Args:
    accepts: int32[loops], accept length of each cycle: the walk reads the
      head for one row more where it reads it row by row, and extend asks for
      that row.

  Returns:
    a float that depends on every output.
  """
  spec, B = m.spec, state.length.shape[0]
  target = lambda *a, **k: m.target.apply({"params": m.target_params}, *a, **k)
  drafter = lambda *a, **k: m.drafter.apply(
    {"params": m.drafter_params}, *a, **k
  )
  # ids differ by row and pass, as real ones: equal rows could be shared, and
  # would choose the same experts
  ids = lambda seed, number, rows: (
    (seed[:, None] + 977 * number + jnp.arange(rows)) % m.ends.shape[0]
  )
  at = lambda rows: state.length[:, None] + jnp.arange(rows)
  M, L = spec.num_nodes, spec.levels

  def level(number: int, feature, rows: list[KV], seed):
    width = spec.width[number - 1]
    earlier, joined = None, None
    if rows:
      joined = jax.tree.map(lambda *a: jnp.concatenate(a, axis=2), *rows)
      sees = jnp.ones((B, width, sum(spec.width[: number - 1])), bool)
      earlier = masks.Tree(sees)
    return drafter(
      ids(seed, number, width),
      jnp.broadcast_to(feature[:, :1], (B, width, feature.shape[-1])),
      jnp.broadcast_to(state.length[:, None], (B, width)),
      masks.Attend(own=masks.Itself(), earlier=earlier, length=state.length),
      state.draft_cache[0],
      joined,
      (),
    )

  def once(i, carry):
    seed, feature, most = carry
    accept = jnp.broadcast_to(accepts[i], (B,))
    rows: list[KV] = []
    for number in range(1, L):
      feature, made = level(number, feature, rows, seed)
      rows.append(made)
      most = jnp.maximum(most, jnp.max(drafter(feature, method="logits")))
    parents = jnp.broadcast_to(jnp.maximum(jnp.arange(M) - 1, 0), (B, M))
    out, _ = target(
      ids(seed, L, M),
      at(M),
      masks.Attend(
        own=masks.Tree(tree.ancestors(parents, M)), length=state.length
      ),
      state.cache,
    )
    score = lambda x: jnp.max(target(x, method="logits"))
    if m.lazy_head:
      most = jax.lax.fori_loop(
        0,
        accepts[i] + 1,
        lambda step, most: jnp.maximum(most, score(out.feature[:, step])),
        most,
      )
    else:
      most = jnp.maximum(most, score(out.feature))
    path = jnp.minimum(jnp.arange(L + 1), accept[:, None])
    reads = jnp.take_along_axis(
      decoding.drafter_reads(m, out), path[..., None], axis=1
    )
    feature, _ = drafter(
      ids(seed, L + 1, L + 1),
      drafter(reads, method="fuse"),
      at(L + 1),
      masks.Attend(own=masks.Causal(), length=state.length),
      state.draft_cache[0],
      None,
      (),
      accept[:, None],
    )
    most = jnp.maximum(most, jnp.max(drafter(feature, method="logits")))
    seed = (seed + 1 + (most > 1e9)) % m.ends.shape[0]
    return seed, feature, most

  start = (
    jnp.zeros(B, jnp.int32),
    state.root_feature[:, None],
    jnp.zeros((), jnp.float32),
  )
  return jax.lax.fori_loop(0, len(accepts), once, start)[2]


@functools.cache
def _compiled():
  return jax.jit(
    networks,
    compiler_options=engine.compiler_options(jax.default_backend()),
  )


def capacities(e: engine.Engine, prompt: int, accepts: Sequence[int]):
  """Slots of the cache in each cycle of an answer that was decoded alone."""
  plan = engine.prefill_plan(prompt)
  first = engine.slots_needed(plan, [prompt], [0], e.step)
  lengths = itertools.accumulate((a + 1 for a in accepts), initial=prompt)
  return [
    engine.capacity_for(max(first, n + e.step), e.most)
    for n in itertools.islice(lengths, len(accepts))
  ]


def _alone(e: engine.Engine, prompt: int, result: Result) -> float:
  """Seconds of the networks of all cycles of an answer, from a loop at each
  size that its cache had."""
  total = 0.0
  sizes = np.array(capacities(e, prompt, result.accept_lengths))
  for slots in np.unique(sizes).tolist():
    mine = np.asarray(result.accept_lengths, np.int32)[sizes == slots]
    accepts = jnp.asarray(np.resize(mine, LOOPS))
    state = states.init_state(e.models, 1, slots, slots)
    state = state.replace(length=jnp.full(1, slots // 2, jnp.int32))
    run = lambda s=state, a=accepts: jax.block_until_ready(
      _compiled()(e.models, s, a)
    )
    run()  # compiled, weights touched
    began = time.perf_counter()
    run()
    total += (time.perf_counter() - began) / LOOPS * len(mine)
  return total


def of_answers(e: engine.Engine, requests: Sequence[Request]) -> dict | None:
  """Milliseconds of a cycle in real answers and of its networks, in turn.

  Args:
    e: decodes one row at a time.

  Returns:
    cycle_ms and networks_ms, means over all cycles; overhead: the share of a
    cycle that is not its networks, with an interval (bootstrap over answers);
    the number of answers. None where those are too few.
  """
  if e.batch_size != 1:
    raise ValueError(f"batch_size {e.batch_size} must be 1")
  sums = []
  for request in requests:
    (result,) = e.generate([request])
    cycles = len(result.accept_lengths)
    if cycles:  # else it ended at once
      alone = _alone(e, len(request.prompt_ids), result)
      sums.append((result.decode_seconds, alone, cycles))
  if len(sums) < LEAST:
    return None
  every = np.array(sums)
  found = measure.bootstrap(every, lambda s: 1 - s[..., 1] / s[..., 0])
  seconds, alone, cycles = every.sum(0)
  return {
    "cycle_ms": float(seconds / cycles) * 1e3,
    "networks_ms": float(alone / cycles) * 1e3,
    "overhead": measure.interval(found),
    "answers": len(sums),
  }
