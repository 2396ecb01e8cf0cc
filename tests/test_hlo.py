"""What is read from compiled programs, against programs counted by hand."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.bench import hlo, roofline

# Four trips of a loop: a table row looked up, a product with a weight that is
# prefetched on chip, a cache row written in place. Around it a choice.
TEXT = (
  pathlib.Path(__file__).parent / "goldens" / "hand_counted.hlo.txt"
).read_text()


def read(text: str) -> tuple[hlo.Module, dict[str, hlo.Cost]]:
  module = hlo.parse(text)
  reader = hlo.Reader(module, lambda op: None, lambda op: op)
  return module, reader.cost(module.entry)


def test_counted_by_hand():
  _, costs = read(TEXT)
  # Eight rows of 128 read; the result stays on chip.
  assert costs["look"].bytes == 4 * 8 * 128 * 2
  assert costs["look"].small_cycles == costs["look"].cycles == 400
  # The weight, charged by its prefetch, and the result of the sum.
  assert costs["work"].bytes == 4 * (128 * 256 * 2 + 8 * 256 * 2)
  assert costs["work"].flops == 4 * 2 * 8 * 128 * 256
  assert costs["work"].cycles == 4000
  assert costs["work"].small_cycles == 0
  assert costs["work"].collectives == {"all-reduce": (4, 4 * 8 * 256 * 2)}
  # Four rows of eight heads and the slot's number; not the cache.
  assert costs["keep"].bytes == 4 * (8 * 4 * 128 * 2 + 4)
  # The shorter branch, a padded vector in and out.
  assert costs["choice"].bytes == 2 * 128 * 4
  # The loop's comparison, two numbers and a predicate, has no name.
  assert set(costs) == {"look", "work", "keep", "choice", ""}
  assert costs[""].bytes == 4 * (4 + 4 + 1)


def test_given_trips_win():
  module = hlo.parse(TEXT)
  reader = hlo.Reader(module, lambda op: 2.5, lambda op: op)
  assert reader.cost(module.entry)["work"].cycles == 2500
  assert reader.loop_body("jit(f)/while") == "%body"


def test_unknown_trips_are_refused():
  text = TEXT.replace("direction=LT", "direction=NE")
  with pytest.raises(ValueError, match="trips of %loop"):
    read(text)


def test_copies_of_a_cache():
  text = TEXT.replace(
    "ROOT %out",
    "%again = bf16[1,8,256,128]{3,1,2,0:T(8,128)} copy(%kept)\n  ROOT %out",
  )
  cache = {(1, 8, 256, 128)}
  module = hlo.parse(text)
  assert hlo.whole_copies(module, module.entry, cache) == {"main to main": 1}
  assert hlo.whole_copies(hlo.parse(TEXT), module.entry, cache) == {}


def test_a_real_loop():
  """XLA counts the body once; seven trips of it are run."""

  def f(x, w):
    return jax.lax.fori_loop(0, 7, lambda _, x: jnp.tanh(x @ w), x)

  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  program = jax.jit(f).lower(shape(16, 64), shape(64, 64)).compile()
  _, costs = read(program.as_text())
  assert sum(c.flops for c in costs.values()) == 7 * 2 * 16 * 64 * 64
  moved = sum(c.bytes for c in costs.values())
  least = 7 * 4 * (64 * 64 + 2 * 16 * 64)  # weight, rows in, rows out
  assert least <= moved <= 1.6 * least
  assert program.cost_analysis()["flops"] < 2.1 * 16 * 64 * 64


def test_batched_products_of_a_tpu():
  """A batch of products is a window dilated by its own size."""
  of = lambda *s: hlo.Array("bf16", s, "")
  flops = hlo._convolution_flops(
    of(8, 4, 60, 128),
    of(8, 4, 128, 50),
    of(8, 4, 60, 50),
    "window={size=8x4 stride=7x3 lhs_dilate=8x4}, dim_labels=01bf_01io->01bf",
  )
  assert flops == 2 * 8 * 4 * 60 * 128 * 50
  # heads as a padded, reversed window: one tap meets each output
  flops = hlo._convolution_flops(
    of(60, 4096, 1),
    of(4096, 128, 32),
    of(60, 128, 32),
    "window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_io0->bf0",
  )
  assert flops == 2 * 60 * 4096 * 128 * 32


@pytest.mark.parametrize(
  "line",
  [
    "%o = token[] outfeed(%a, %t), outfeed_shape=f32[2]{0}",
    "%i = ((f32[2]{0}), token[]) infeed(%t)",
    "%s = (f32[2]{0}, u32[], token[]) send(%a, %t), channel_id=1,"
    " is_host_transfer=true",
    '%c = f32[] custom-call(%a), custom_call_target="xla_python_cpu_callback"',
    "%a.1 = f32[2]{0:T(128)S(5)} copy(%a)",
  ],
)
def test_host_transfers_are_recognised(line):
  assert hlo.host_transfers(line)
  assert not hlo.host_transfers(TEXT)


def test_roofline():
  chip = roofline.Chip("c", 1e9, 1e9, 1e12, 4, 1e8, 1e9)
  cost = hlo.Cost(
    flops=5e8,
    bytes=2e6,
    small_cycles=1000,
    collectives={"all-reduce": (2, 4e5)},
  )
  time = roofline.time_of(cost, chip, 4)
  assert time.memory == pytest.approx(2e-3)
  assert time.compute == pytest.approx(5e-4)
  # 2 * 3/4 of the bytes over two links of a ring, two passes of two hops
  assert time.network == pytest.approx(1.5 * 4e5 / 2e8 + 2 * 2 * 2e-6)
  assert time.small == pytest.approx(1e-6)
  assert time.total == pytest.approx(2e-3 + time.network + 1e-6)
  assert roofline.time_of(cost, chip, 1).network == 0


def test_prediction():
  times = lambda s: dict.fromkeys(
    ("seconds", "compiler_seconds", "bound_seconds"), s
  )
  found = roofline.predict(times(0.010), times(0.016), 4.0)["seconds"]
  assert found["plain_tokens_per_s"] == pytest.approx(100)
  assert found["tokens_per_s"] == pytest.approx(250)
  assert found["ratio"] == pytest.approx(2.5)
  assert found["break_even_tau"] == pytest.approx(1.6)
  unknown = roofline.predict(times(0.010), times(0.016), None)["seconds"]
  assert unknown["ratio"] is None
