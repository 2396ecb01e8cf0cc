"""How fast a program can be on a chip: bytes, operations and links.

The time of a stage is the larger of its memory time and its compute time,
plus what nothing of a decode cycle overlaps: its collectives (a layer's sum
must arrive before the next layer starts) and its small operations (a softmax of
a few rows takes its time however little it moves; by the compiler's estimate of
cycles, which it does not give for sorts). Stages follow each other.
"""

import dataclasses
from collections.abc import Mapping

from eagle_jax.bench.hlo import Cost


@dataclasses.dataclass(frozen=True)
class Chip:
  """What one JAX device can do, by its maker's data sheet.

  memory: bytes of main memory. bandwidth: bytes/s of it. flops: bfloat16
  FLOP/s. links: ports to neighbours. link: bytes/s of a port, one way.
  clock: Hz of the core.
  """

  kind: str
  memory: float
  bandwidth: float
  flops: float
  links: int
  link: float
  clock: float


# Memory, bandwidth, FLOP/s and interconnect as in the "System architecture"
# tables of cloud.google.com/tpu/docs/{v5e,v5p,v6e}; the interconnect is
# given there for all ports and both ways, here for one port and one way.
# Clocks follow from FLOP/s and the matrix units, flops / (2 * units * rows *
# columns): 8 of 128 x 128 (v5p), 4 of 128 x 128 (v5e), 4 of 256 x 256
# (v6e; its cycle estimates then read weights at 0.9 of the sheet's bandwidth,
# as the other chips' do).
CHIPS = {
  "v5e": Chip("v5e", 16e9, 0.819e12, 197e12, 4, 50e9, 1.5e9),
  "v5p": Chip("v5p", 95e9, 2.765e12, 459e12, 6, 100e9, 1.75e9),
  "v6e": Chip("v6e", 32e9, 1.64e12, 918e12, 4, 100e9, 1.75e9),
}
HOP_SECONDS = 1e-6  # start-up of one collective step; an order of magnitude


@dataclasses.dataclass(frozen=True)
class Time:
  """Seconds of a stage, and what they are spent on."""

  memory: float
  compute: float
  network: float
  small: float

  @property
  def total(self) -> float:
    return max(self.memory, self.compute) + self.network + self.small


def network_seconds(cost: Cost, chip: Chip, ways: int) -> float:
  """Of ring collectives over `ways` chips, both directions of a ring used.

  n bytes on each chip:  all-reduce 2 n (k-1)/k, reduce-scatter n (k-1)/k,
  all-gather n (k-1), all-to-all n (k-1)/k, permute n.
  """
  if ways == 1:
    return 0.0
  share = (ways - 1) / ways
  factor = {
    "all-reduce": 2 * share,
    "reduce-scatter": share,
    "all-gather": ways - 1,
    "all-to-all": share,
    "collective-permute": 1,
  }
  seconds = 0.0
  for kind, (count, moved) in cost.collectives.items():
    passes = 2 if kind == "all-reduce" else 1
    seconds += factor[kind] * moved / (2 * chip.link)
    seconds += count * passes * HOP_SECONDS * (ways // 2)
  return seconds


def time_of(cost: Cost, chip: Chip, ways: int) -> Time:
  return Time(
    cost.bytes / chip.bandwidth,
    cost.flops / chip.flops,
    network_seconds(cost, chip, ways),
    cost.small_cycles / chip.clock,
  )


def total(stages: Mapping[str, Time]) -> float:
  return sum(t.total for t in stages.values())


def predict(plain: dict, decode: dict, tau: float | None) -> dict:
  """What drafting gains, from two analyses (`lowering.analyse`).

  Returns, for the roofline ("seconds"), the compiler's own estimate
  ("compiler_seconds") and the least that the hardware allows
  ("bound_seconds"): tokens/s of plain decoding and of cycles that keep `tau`
  tokens, their ratio, and the tau at which they break even.
  """
  found = {}
  for name in ("seconds", "compiler_seconds", "bound_seconds"):
    pass_seconds, cycle = plain[name], decode[name]
    found[name] = {
      "plain_tokens_per_s": 1 / pass_seconds,
      "tokens_per_s": tau / cycle if tau else None,
      "ratio": tau * pass_seconds / cycle if tau else None,
      "break_even_tau": cycle / pass_seconds,
    }
  return found
