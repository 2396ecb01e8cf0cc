"""python -m eagle_jax.bench.reality: is the forecast right on this device?

Reads the very programs that decode a prompt as `tpu/compile.py` reads a TPU's,
forecasts their time from what this device does in one second (measured here),
and sets it beside the time they took.
"""

import time

import jax
import jax.numpy as jnp
from absl import flags

from eagle_jax import generation, loading, script
from eagle_jax.bench import lowering, roofline
from eagle_jax.bench.roofline import Chip
from eagle_jax.errors import InputError
from eagle_jax.generation import Answer, Generator


def best_seconds(run, times: int) -> float:
  """The fastest of several calls; the first compiles."""
  jax.block_until_ready(run())
  found = []
  for _ in range(times):
    began = time.perf_counter()
    jax.block_until_ready(run())
    found.append(time.perf_counter() - began)
  return min(found)


def here(dtype: str, size: int, times: int) -> Chip:
  """This device: bytes/s of a weight met by one row, FLOP/s of many rows.

  Args:
    size: the weight is [size, size]; it should not fit in a cache.
  """
  weight = jnp.ones((size, size), dtype)
  product = jax.jit(lambda x, w: x @ w)
  seconds = lambda rows: best_seconds(
    lambda: product(jnp.ones((rows, size), dtype), weight), times
  )
  rows = 256
  return Chip(
    kind=jax.devices()[0].device_kind,
    memory=0.0,
    bandwidth=weight.nbytes / seconds(1),
    flops=2 * rows * size * size / seconds(rows),
    links=0,
    link=0.0,
    clock=1e9,  # for estimates of cycles, which only TPU programs carry
  )


def compare(generator: Generator, answer: Answer, chip: Chip) -> dict:
  """Forecast and measured seconds of a cycle of the chunk that ran last."""
  result = answer.result
  cycles = len(result.accept_lengths)
  if not cycles:
    raise InputError("the answer ended before a cycle ran: ask for more")
  chunks = [k for k in generator.engine.programs if k[0] == "chunk"]
  capacity = max(k[1] for k in chunks)
  text = generator.engine.programs["chunk", capacity].as_text()
  costs = lowering.cycle_costs(text, result.tau)
  times = {k: roofline.time_of(c, chip, 1) for k, c in costs.items()}
  return {
    "forecast": roofline.total(times),
    "measured": result.decode_seconds / cycles,
    "tau": result.tau,
    "bytes": sum(c.bytes for c in costs.values()),
    "flops": sum(c.flops for c in costs.values()),
  }


def _run(f) -> None:
  generation.use_compilation_cache()
  target, drafter = loading.load_pair(f.target, f.drafter, f.dtype, print)
  chip = here(target.config.dtype, f.size, 5)
  print(
    f"{chip.kind}: {chip.bandwidth / 1e9:.1f} GB/s of weights,"
    f" {chip.flops / 1e9:.0f} GFLOP/s"
  )
  found = {}
  for method in generation.METHODS:
    generator = Generator(target, drafter, method)
    for _ in range(2):  # the first touches all weights
      (answer,) = generator.generate([f.prompt], f.max_new_tokens)
    found[method] = one = compare(generator, answer, chip)
    print(
      f"{method}: {one['bytes'] / 1e9:.3f} GB, {one['flops'] / 1e9:.2f} GFLOP"
      f" a cycle, tau {one['tau']:.2f}; forecast"
      f" {one['forecast'] * 1e3:.2f} ms, measured"
      f" {one['measured'] * 1e3:.2f} ms"
    )
  gain = lambda which: (
    found["eagle"]["tau"] * found["plain"][which] / found["eagle"][which]
  )
  print(
    f"ratio to plain: forecast {gain('forecast'):.2f},"
    f" measured {gain('measured'):.2f}"
  )


if __name__ == "__main__":
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
  flags.DEFINE_string("drafter", None, "As in decode.py.")
  flags.DEFINE_string("dtype", None, "As in decode.py.")
  flags.DEFINE_string("prompt", "Why is the sky blue?", "To decode.")
  flags.DEFINE_integer("max_new_tokens", 96, "Of the answer.")
  flags.DEFINE_integer("size", 8192, "Sides of the weight that is timed.")
  script.run("reality", _run)
