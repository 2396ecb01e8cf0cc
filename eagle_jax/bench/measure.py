"""Methods in turn, prompt by prompt, so that a noisy machine hits all alike."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from eagle_jax import generation, text
from eagle_jax.bench.suites import Question
from eagle_jax.config import Sampling
from eagle_jax.generation import Answer, Generator
from eagle_jax.speculation.audit import Divergence
from eagle_jax.speculation.requests import Request, cut_cycles

LOOP = 20  # an n-gram of that many tokens seen twice is a looping tail
DRAWS = 2000  # of every bootstrap
# Tokens committed before a cycle: the first of a band, and the next one's.
EDGES = (0, 256, 512, 1024, 2048, 4096, 8192)


class Method(Protocol):
  """What can be measured: a `Generator`, or another engine's generate."""

  def run(
    self, requests: Sequence[Request], prompts: Sequence[str]
  ) -> list[Answer]: ...


@dataclasses.dataclass(frozen=True)
class Row:
  """One answer of one method.

  accept_lengths: one a cycle. divergence: None where plain decoding gave the
  same tokens, or was not asked. question: index of the prompt; its turns are
  resampled together. decode_seconds: after prefill. prompt_tokens: before the
  answer.
  """

  tokens: list[int]
  accept_lengths: list[int]
  seconds: float
  divergence: Divergence | None
  question: int
  decode_seconds: float
  prompt_tokens: int


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
  methods: dict[str, Method],
  first: Generator,
  questions: Sequence[Question],
  sampling: Sampling,
  max_new_tokens: int,
  seed: int,
  turns: int,
  progress: Callable[[str, int], None],
) -> tuple[dict[str, list[Row]], int]:
  """Ask every question of every method.

  Later turns continue the conversation of the first method, so that all
  methods answer the same prompts. A later turn that no longer fits the
  context is left out, and so are those after it.

  Args:
    methods: the baseline "plain" first where it is among them.
    first: encodes the prompts; its context is everybody's.
    turns: turns of a question that are asked (0 = all).
    progress: called with a method and a question's index as each begins.

  Returns:
    rows by method, and how many turns did not fit.
  """
  rows: dict[str, list[Row]] = {name: [] for name in methods}
  left_out = 0
  for index, question in enumerate(questions):
    messages: list[dict] = []
    asked = question.turns[: turns or None]
    for turn, line in enumerate(asked):
      messages.append({"role": "user", "content": line})
      ids = text.encode_messages(first.target.tokenizer, messages)
      if turn and len(ids) >= first.engine.context:
        left_out += len(asked) - turn
        break
      request = Request(
        ids, max_new_tokens, sampling, seed, question.number, turn
      )
      answers: dict[str, Answer] = {}
      # Who goes first moves on, so that warm caches favour nobody.
      names = list(methods)
      shift = (index + turn) % len(names)
      for name in names[shift:] + names[:shift]:
        progress(name, index)
        answers[name] = methods[name].run([request], [line])[0]
      for name, answer in answers.items():
        diverged = None
        # Another engine draws its samples with other dice.
        same_dice = isinstance(methods[name], Generator)
        comparable = same_dice or not sampling.temperature
        if name != "plain" and "plain" in answers and comparable:
          diverged = generation.divergence(
            methods["plain"], answers["plain"], answer
          )
        r = answer.result
        rows[name].append(
          Row(
            r.token_ids,
            r.accept_lengths,
            r.seconds,
            diverged,
            index,
            r.decode_seconds,
            len(ids),
          )
        )
      reply = answers[names[0]].text
      messages.append({"role": "assistant", "content": reply})
  return rows, left_out


def _kept(row: Row, loops: bool) -> tuple[int, int]:
  """(tokens, cycles) of a row, prefill's token in neither."""
  kept = len(row.tokens) if loops else until_loop(row.tokens)
  return max(kept - 1, 0), len(cut_cycles(row.accept_lengths, kept - 1))


def tau(rows: Sequence[Row], loops: bool = True) -> float | None:
  """Tokens kept a verify pass, a ratio of sums; prefill's token in neither.

  Args:
    loops: False cuts each answer where it begins to loop.
  """
  tokens, cycles = (
    sum(x) for x in zip((0, 0), *(_kept(r, loops) for r in rows), strict=True)
  )
  return tokens / cycles if cycles else None


def tau_by_context(rows: Sequence[Row]) -> dict[str, dict]:
  """{"256": {"tau", "cycles"}, ...}: by the tokens committed before a cycle,
  from an edge of EDGES to the next; where no cycle began is left out."""
  at, kept = [], []
  for row in rows:
    tokens = np.asarray(row.accept_lengths, int) + 1
    at.append(row.prompt_tokens + np.cumsum(tokens) - tokens)
    kept.append(tokens)
  at, kept = (np.concatenate([*x, np.zeros(0, int)]) for x in (at, kept))
  out = {}
  band = np.searchsorted(EDGES, at, side="right") - 1
  for i, edge in enumerate(EDGES):
    inside = kept[band == i]
    if len(inside):
      out[str(edge)] = {"tau": float(inside.mean()), "cycles": len(inside)}
  return out


def accept_by_depth(rows: Sequence[Row]) -> list[float]:
  """Share of cycles that accepted level i + 1, of those that had level i."""
  lengths = np.concatenate([r.accept_lengths for r in rows] or [[]])
  top = int(lengths.max()) if lengths.size else 0
  return [float(np.mean(lengths[lengths >= i] > i)) for i in range(top)]


def by_question(
  rows: Sequence[Row], values: Callable[[Row], Sequence[float]]
) -> np.ndarray:
  """[questions, values]: each question's sums over its turns."""
  sums: dict[int, np.ndarray] = {}
  for row in rows:
    value = np.asarray(values(row), float)
    sums[row.question] = sums.get(row.question, 0) + value
  return np.stack([sums[q] for q in sorted(sums)])


def bootstrap(
  sums: np.ndarray, figure: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> tuple[float, float, float]:
  """A figure of sums over questions: its value, and a 95% interval.

  Whole questions are resampled, with all that was measured of them, so that
  turns of one conversation are never taken for independent.

  Args:
    sums: [questions, values]. figure: [..., values] -> [...].
  """
  n = len(sums)
  index = np.random.default_rng(seed).integers(0, n, (DRAWS, n))
  low, high = np.nanpercentile(figure(sums[index].sum(1)), [2.5, 97.5])
  return float(figure(sums.sum(0))), float(low), float(high)


def interval(found: tuple[float, float, float]) -> dict[str, float]:
  """What `bootstrap` returns, as it is written to files."""
  return dict(zip(("value", "low", "high"), found, strict=True))


def tau_interval(rows: Sequence[Row]) -> tuple[float, float, float]:
  """tau and its 95% interval."""
  sums = by_question(rows, lambda r: _kept(r, True))
  return bootstrap(sums, lambda s: s[..., 0] / s[..., 1])


def tau_difference(
  a: Sequence[Row], b: Sequence[Row]
) -> tuple[float, float, float]:
  """tau of `b` less tau of `a` on the same questions, and its interval."""
  pair = [by_question(rows, lambda r: _kept(r, True)) for rows in (a, b)]
  return bootstrap(
    np.concatenate(pair, axis=1),
    lambda s: s[..., 2] / s[..., 3] - s[..., 0] / s[..., 1],
  )


def ratio(
  plain: Sequence[Row], other: Sequence[Row]
) -> tuple[float, float, float]:
  """Speed of `other` over `plain`: value, and a 95% paired bootstrap.

  Both are tokens over seconds, summed; questions are resampled in pairs.
  """
  pair = [
    by_question(rows, lambda r: (len(r.tokens), r.seconds))
    for rows in (plain, other)
  ]
  return bootstrap(
    np.concatenate(pair, axis=1),
    lambda s: s[..., 2] / s[..., 3] / (s[..., 0] / s[..., 1]),
  )


def summary(rows: dict[str, list[Row]]) -> dict[str, dict]:
  """One suite's figures by method, as written to bench.json."""
  out = {}
  for name, mine in rows.items():
    tokens = sum(len(r.tokens) for r in mine)
    found = [r.divergence for r in mine if r.divergence is not None]
    entry = {
      "tau": tau(mine),
      "tau_without_loops": tau(mine, loops=False),
      "tau_by_context": tau_by_context(mine),
      "accept_by_depth": accept_by_depth(mine),
      "tokens_per_s": tokens / sum(r.seconds for r in mine),
      "tokens": tokens,
      "cycles": sum(len(r.accept_lengths) for r in mine),
      "answers": len(mine),
      "prompts": len({r.question for r in mine}),
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
