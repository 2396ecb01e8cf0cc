"""How much of a decode cycle is not the two networks' arithmetic.

Parts that are timed alone do not tell: each has its own dispatch, and finds
other data in the caches. So the networks of a cycle run in a loop of their
own, with the shapes of the cycle and nothing between them, in turn with real
answers. What a cycle takes beyond that is choosing, building and walking the
tree, drawing, committing, and the host.
"""

import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.bench import measure
from eagle_jax.generation import Generator
from eagle_jax.models import masks
from eagle_jax.models.kv_cache import KV
from eagle_jax.speculation import decoding, engine, tree
from eagle_jax.speculation import state as states
from eagle_jax.speculation.requests import Request
from eagle_jax.speculation.state import DecodeState, Models

LOOPS = 16  # cycles' worth of networks that one call runs


def networks(
  m: Models, state: DecodeState, steps: int, loops: int = LOOPS
) -> jax.Array:
  """The networks' passes of `loops` cycles, and only those.

    cycle     grow   verify   accept   commit   extend
    here      draft levels, target over M rows, heads, drafter over L + 1 rows

  Each loop feeds on the one before (features, token ids), or the compiler
  would take it out.

  Args:
    steps: of the walk, where it reads the head node by node.

  Returns:
    a float that depends on every output.
  """
  spec, B = m.spec, state.length.shape[0]
  target = lambda *a, **k: m.target.apply({"params": m.target_params}, *a, **k)
  drafter = lambda *a, **k: m.drafter.apply(
    {"params": m.drafter_params}, *a, **k
  )
  ids = lambda seed, rows: jnp.broadcast_to(seed[:, None], (B, rows))
  at = lambda rows: state.length[:, None] + jnp.arange(rows)

  def level(number: int, feature, rows: list[KV], seed):
    width = spec.width[number - 1]
    earlier, joined = None, None
    if rows:
      joined = jax.tree.map(lambda *a: jnp.concatenate(a, axis=2), *rows)
      sees = jnp.ones((B, width, sum(spec.width[: number - 1])), bool)
      earlier = masks.Tree(sees)
    out, made = drafter(
      ids(seed, width),
      jnp.broadcast_to(feature[:, :1], (B, width, feature.shape[-1])),
      ids(state.length, width),
      masks.Attend(own=masks.Itself(), earlier=earlier, length=state.length),
      state.draft_cache[0],
      joined,
      (),
    )
    return out, made, jnp.max(drafter(out, method="logits"))

  def once(_, carry):
    seed, feature, most = carry
    found, rows = [most], []
    for number in range(1, spec.levels):
      feature, made, top = level(number, feature, rows, seed)
      rows.append(made)
      found.append(top)
    M = spec.num_nodes
    parents = jnp.broadcast_to(jnp.maximum(jnp.arange(M) - 1, 0), (B, M))
    out, _ = target(
      ids(seed, M),
      at(M),
      masks.Attend(
        own=masks.Tree(tree.ancestors(parents, M)), length=state.length
      ),
      state.cache,
    )
    if m.lazy_head:
      for step in range(steps):
        one = out.feature[:, min(step, M - 1)]
        found.append(jnp.max(target(one, method="logits")))
    else:
      found.append(jnp.max(target(out.feature, method="logits")))
    L = spec.levels
    fused = drafter(decoding.drafter_reads(m, out)[:, : L + 1], method="fuse")
    feature, _ = drafter(
      ids(seed, L + 1),
      fused,
      at(L + 1),
      masks.Attend(own=masks.Causal(), length=state.length),
      state.draft_cache[0],
      None,
      (),
      jnp.full((B, 1), L),
    )
    found.append(jnp.max(drafter(feature, method="logits")))
    most = functools.reduce(jnp.maximum, found)
    seed = (seed + 1 + (most > 1e9)) % m.ends.shape[0]
    return seed, feature, most

  start = (
    jnp.zeros(B, jnp.int32),
    state.root_feature[:, None],
    jnp.zeros((), jnp.float32),
  )
  return jax.lax.fori_loop(0, loops, once, start)[2]


def of_answers(generator: Generator, requests: Sequence[Request]) -> dict:
  """Seconds of a cycle in real answers and of its networks, in turn.

  Returns:
    cycle_ms and networks_ms, means over the answers; overhead: the share of
    the cycle that is not its networks, with an interval (bootstrap over the
    answers); their number.
  """
  e, m = generator.engine, generator.models
  run = jax.jit(
    networks,
    static_argnames=("steps", "loops"),
    compiler_options=engine.compiler_options(jax.default_backend()),
  )
  cycles, alone = [], []
  for request in requests:
    (result,) = e.generate([request])
    if len(result.accept_lengths) < 2:
      continue  # it ended at once
    cycle = result.decode_seconds / len(result.accept_lengths)
    half = len(request.prompt_ids) + len(result.token_ids) // 2
    slots = engine.capacity_for(
      len(request.prompt_ids) + request.max_new_tokens + e.step, e.context
    )
    state = states.init_state(m, 1, slots, slots)
    state = state.replace(length=jnp.full(1, half, jnp.int32))
    tau = len(result.token_ids) / len(result.accept_lengths)
    steps = max(round(tau), 1)
    jax.block_until_ready(run(m, state, steps))  # compiled, weights touched
    began = time.perf_counter()
    jax.block_until_ready(run(m, state, steps))
    cycles.append(cycle)
    alone.append((time.perf_counter() - began) / LOOPS)
  share = lambda pairs: 1 - pairs[..., 1] / pairs[..., 0]
  value, low, high = measure.bootstrap(np.array([cycles, alone]).T, share)
  return {
    "cycle_ms": float(np.mean(cycles)) * 1e3,
    "networks_ms": float(np.mean(alone)) * 1e3,
    "overhead": value,
    "low": low,
    "high": high,
    "answers": len(cycles),
  }
