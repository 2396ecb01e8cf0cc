"""Methods in turn, prompt by prompt, so that a noisy machine hits all alike."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from eagle_jax import generation, text
from eagle_jax.bench.suites import Question
from eagle_jax.config import Sampling
from eagle_jax.generation import Answer, Generator
from eagle_jax.speculation.audit import Divergence
from eagle_jax.speculation.requests import Request, cut_cycles

LOOP = 20  # an n-gram of that many tokens seen twice is a looping tail


@dataclasses.dataclass(frozen=True)
class Row:
  """One answer of one method.

  accept_lengths: one a cycle. divergence: None where plain decoding gave the
  same tokens, or was not asked.
  """

  tokens: list[int]
  accept_lengths: list[int]
  seconds: float
  divergence: Divergence | None


def until_loop(ids: Sequence[int], n: int = LOOP) -> int:
  """Tokens before the second occurrence of an n-gram ends; all if none.

  ids  a b c a b c a ..   n = 3   ->  5: "a b c a b" holds "a b c" once
  """
  seen = set()
  for end in range(n, len(ids) + 1):
    gram = tuple(ids[end - n : end])
    if gram in seen:
      return end - 1
    seen.add(gram)
  return len(ids)


def run(
  generators: dict[str, Generator],
  questions: Sequence[Question],
  sampling: Sampling,
  max_new_tokens: int,
  seed: int,
  turns: int,
  progress: Callable[[str, int], None],
) -> dict[str, list[Row]]:
  """Ask every question of every method.

  Later turns continue the conversation of the first method, so that all
  methods answer the same prompts.

  Args:
    generators: the baseline "plain" first where it is among them.
    turns: turns of a question that are asked (0 = all).
    progress: called with a method and a question's index as each begins.
  """
  rows: dict[str, list[Row]] = {name: [] for name in generators}
  first = next(iter(generators.values()))
  for index, question in enumerate(questions):
    messages: list[dict] = []
    for turn, line in enumerate(question.turns[: turns or None]):
      messages.append({"role": "user", "content": line})
      ids = text.encode_messages(first.target.tokenizer, messages)
      request = Request(
        ids, max_new_tokens, sampling, seed, question.number, turn
      )
      answers: dict[str, Answer] = {}
      # Who goes first moves on, so that warm caches favour nobody.
      names = list(generators)
      shift = (index + turn) % len(names)
      for name in names[shift:] + names[:shift]:
        progress(name, index)
        answers[name] = generators[name].run([request], [line])[0]
      for name, answer in answers.items():
        diverged = None
        if name != "plain" and "plain" in answers:
          diverged = generation.divergence(
            generators["plain"], answers["plain"], answer
          )
        r = answer.result
        rows[name].append(
          Row(r.token_ids, r.accept_lengths, r.seconds, diverged)
        )
      reply = answers[names[0]].text
      messages.append({"role": "assistant", "content": reply})
  return rows


def tau(rows: Sequence[Row], loops: bool = True) -> float | None:
  """Tokens kept a verify pass, a ratio of sums; prefill's token in neither.

  Args:
    loops: False cuts each answer where it begins to loop.
  """
  tokens = cycles = 0
  for row in rows:
    kept = len(row.tokens) if loops else until_loop(row.tokens)
    tokens += max(kept - 1, 0)
    cycles += len(cut_cycles(row.accept_lengths, kept - 1))
  return tokens / cycles if cycles else None


def accept_by_depth(rows: Sequence[Row]) -> list[float]:
  """Share of cycles that accepted level i + 1, of those that had level i."""
  lengths = np.concatenate([r.accept_lengths for r in rows] or [[]])
  top = int(lengths.max()) if lengths.size else 0
  return [float(np.mean(lengths[lengths >= i] > i)) for i in range(top)]


def ratio(
  plain: Sequence[Row], other: Sequence[Row], seed: int = 0
) -> tuple[float, float, float]:
  """Speed of `other` over `plain`: value, and a 95% paired bootstrap.

  Both are tokens over seconds, summed; prompts are resampled in pairs.
  """
  n = np.array([[len(r.tokens) for r in rows] for rows in (plain, other)])
  s = np.array([[r.seconds for r in rows] for rows in (plain, other)])

  def speed(index) -> np.ndarray:
    picked_n, picked_s = n[:, index], s[:, index]
    rate = picked_n.sum(-1) / picked_s.sum(-1)
    return rate[1] / rate[0]

  draws = np.random.default_rng(seed).integers(
    0, n.shape[1], (2000, n.shape[1])
  )
  low, high = np.percentile(speed(draws), [2.5, 97.5])
  return float(speed(np.arange(n.shape[1]))), float(low), float(high)


def summary(rows: dict[str, list[Row]]) -> dict[str, dict]:
  """One suite's figures by method, as written to bench.json."""
  out = {}
  for name, mine in rows.items():
    tokens = sum(len(r.tokens) for r in mine)
    found = [r.divergence for r in mine if r.divergence is not None]
    entry = {
      "tau": tau(mine),
      "tau_without_loops": tau(mine, loops=False),
      "accept_by_depth": accept_by_depth(mine),
      "tokens_per_s": tokens / sum(r.seconds for r in mine),
      "tokens": tokens,
      "cycles": sum(len(r.accept_lengths) for r in mine),
      "prompts": len(mine),
      "diverged": sum(not d.excused for d in found),
      "near_ties": [dataclasses.asdict(d) for d in found],
    }
    if "plain" in rows:
      value, low, high = ratio(rows["plain"], mine)
      entry |= {
        "ratio_to_plain": value,
        "ratio_low": low,
        "ratio_high": high,
      }
    out[name] = entry
  return out
