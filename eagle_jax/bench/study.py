"""What all sections of the report read, and their common words."""

import dataclasses
import itertools
from collections.abc import Sequence

from eagle_jax.bench import measure, replay
from eagle_jax.bench.measure import Row
from eagle_jax.bench.page import Claim
from eagle_jax.bench.replay import Known
from eagle_jax.bench.suites import Question
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.loading import LoadedTarget
from eagle_jax.training import acceptance


@dataclasses.dataclass
class Study:
  """What all sections read.

  asked: suite -> questions. known: (suite, temperature) -> plain answers.
  """

  target: LoadedTarget
  drafter: LoadedDrafter
  ablations: dict[str, LoadedDrafter]
  asked: dict[str, list[Question]]
  known: dict[tuple[str, float], Known]
  budgets: Sequence[int]
  batch_size: int
  seed: int
  max_new_tokens: int

  @property
  def prompts(self) -> int:
    return sum(map(len, self.asked.values()))

  def all_known(self, temperature: float) -> Known:
    parts = [self.known[s, temperature] for s in self.asked]
    return Known(
      [r for p in parts for r in p.requests],
      [a for p in parts for a in p.answers],
    )

  def dynamic(self, nodes: int, drafter: LoadedDrafter) -> str:
    """EAGLE-2's shape, cut where the budget or the vocabulary is small."""
    branch = min(10, drafter.config.draft_vocab_size)
    levels = min(6, nodes - 1)
    return acceptance.dynamic_name(nodes, levels, branch)

  def replayed(
    self, known: Known, draftings: dict[replay.Name, replay.Drafting]
  ) -> dict[replay.Name, list[Row]]:
    return replay.replay(self.target, draftings, known, self.batch_size)

  def by_suite(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of `all_known`, in its order, suite by suite."""
    left = iter(rows)
    return {
      s: list(itertools.islice(left, len(q))) for s, q in self.asked.items()
    }


def sign(entry: dict) -> bool | None:
  """Is the figure above 0? None where its interval holds both signs."""
  return True if entry["low"] >= 0 else False if entry["high"] < 0 else None


def above(entry: dict, text: str, names: str) -> Claim:
  """A claim that a difference of two taus is not below 0.

  Args:
    entry: value, low and high. text: the claim. names: what is subtracted from
      what.
  """
  span = f"95% {entry['low']:+.3f} to {entry['high']:+.3f}"
  return Claim(text, sign(entry), f"{names}: {entry['value']:+.3f} tau, {span}")


def ordered(
  better: Sequence[Row], worse: Sequence[Row], text: str, names: str
) -> Claim:
  """A claim that one tau is at least another, by the paired interval; text and
  names as in `above`."""
  found = measure.interval(measure.tau_difference(worse, better))
  return above(found, text, names)


def span(entry: dict, name: str = "value", digits: int = 2) -> str:
  """A figure with its interval, to read."""
  f = f".{digits}f"
  between = " to " if entry["low"] < 0 else "–"  # -0.1–0.2 reads as -0.1, -0.2
  return f"{entry[name]:{f}} ({entry['low']:{f}}{between}{entry['high']:{f}})"
