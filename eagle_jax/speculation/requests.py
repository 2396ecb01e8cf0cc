"""What is asked of the engine, and what came of it. Plain Python."""

import dataclasses
from collections.abc import Sequence

from eagle_jax.config import Sampling
from eagle_jax.errors import InputError


def check_seed(seed: int) -> None:
  if not 0 <= seed < 2**32:
    raise InputError(f"seed {seed} must be from 0 to {2**32 - 1}")


@dataclasses.dataclass(frozen=True)
class Request:
  """One row to decode.

  seed: of the noise, below 2**32. number, sample: with it they key the row's
    noise; never the batch slot.
  """

  prompt_ids: Sequence[int]
  max_new_tokens: int
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  seed: int = 0
  number: int = 0
  sample: int = 0

  def __post_init__(self):
    check_seed(self.seed)


@dataclasses.dataclass
class Result:
  """What came of a request.

  token_ids: new tokens, an end id included. accept_lengths: one a cycle.
  finish_reason: "stop" (an end id or a stop string) or "length".
  seconds: wall clock of its batch, prefill included; compilation not, but in a
    running batch (`Engine.serve`) that compiles as it goes.
  decode_seconds: the part after the first token.
  """

  token_ids: list[int]
  accept_lengths: list[int]
  finish_reason: str
  seconds: float
  decode_seconds: float

  @property
  def tau(self) -> float | None:
    """Tokens kept a verify pass; prefill's token counts in neither."""
    cycles = len(self.accept_lengths)
    return (len(self.token_ids) - 1) / cycles if cycles else None


def shared_slots(row: Sequence[int], prompt: Sequence[int]) -> int:
  """How many committed slots a new prompt can use again.

  row holds n + 1 tokens in n slots. Drafter slot t holds token t + 1 as well,
  so the last shared token's slot is made anew:

    row     a b c d e     slots of a b c d
    prompt  a b c x y     shared a b c -> slots of a b
  """
  same = 0
  for a, b in zip(row, prompt):  # noqa: B905 (the shorter one ends it)
    if a != b:
      break
    same += 1
  return max(0, min(same - 1, len(row) - 1, len(prompt) - 1))


def cut_cycles(accept_lengths: list[int], tokens: int) -> list[int]:
  """The cycles that gave the first `tokens` tokens, the last one cut."""
  kept = []
  for a in accept_lengths:
    if tokens <= 0:
      break
    kept.append(min(a, tokens - 1))
    tokens -= a + 1
  return kept
