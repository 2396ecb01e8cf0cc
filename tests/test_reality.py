"""The forecast beside the clock, on the device at hand."""

import folders

from eagle_jax import generation, loading
from eagle_jax.bench import reality


def test_reads_the_program_that_ran(tmp_path):
  """The target's weights are read once a pass, the drafter's more often."""
  pair = folders.pair(tmp_path, ends=())
  target = loading.load_target(pair.target, "float32", print)
  drafter = loading.load_drafter(pair.drafter, target, print)
  chip = reality.here("float32", 64, 1)
  assert chip.bandwidth > 0
  assert chip.flops > 0
  generator = generation.Generator(target, drafter, "eagle")
  (answer,) = generator.generate(["why?"], max_new_tokens=8)
  found = reality.compare(generator, answer, chip)
  assert found["measured"] > 0
  assert found["tau"] == answer.result.tau
  c = target.config
  layer = c.hidden_size * (4 + 2 + 2) * c.head_size + 32 * 32
  weights = 4 * (layer + 3 * 32 * c.mlp_size + c.vocab_size * 32)
  assert found["bytes"] > 2 * weights
  assert found["flops"] > 2 * (layer + 3 * 32 * c.mlp_size)
  assert found["forecast"] >= found["bytes"] / chip.bandwidth * 0.99
