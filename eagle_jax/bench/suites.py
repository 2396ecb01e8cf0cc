"""Prompt suites in the public question.jsonl format."""

import dataclasses
import pathlib
from collections.abc import Sequence

from eagle_jax.errors import InputError
from eagle_jax.training import chats

SHIPPED = pathlib.Path(__file__).parent / "small.jsonl"


@dataclasses.dataclass(frozen=True)
class Question:
  """One conversation: the user's turns, asked one after another."""

  number: int
  category: str
  turns: tuple[str, ...]


def read_all(files: Sequence[str], limit: int) -> dict[str, list[Question]]:
  """Suites by file name; none = the shipped prompts."""
  paths = [pathlib.Path(f) for f in files] or [SHIPPED]
  stems = [p.stem for p in paths]
  for stem in stems:
    if stems.count(stem) > 1:
      raise InputError(
        f"two suites have the same file name {stem!r}: rename one"
      )
  return {p.stem: read(p, limit) for p in paths}


def read(file: pathlib.Path, limit: int) -> list[Question]:
  """Questions of a suite; limit 0 = all, else the first ones.

  Raises:
    InputError: a row without question_id or turns, with file and line.
  """
  questions = []
  for where, row in chats.read_jsonl(file):
    turns = row.get("turns")
    fit = isinstance(turns, list) and turns
    if not fit or not all(isinstance(t, str) and t for t in turns):
      raise InputError(f"{where}: turns must be a list of texts")
    if not isinstance(row.get("question_id"), int):
      raise InputError(f"{where}: question_id must be a number")
    questions.append(
      Question(row["question_id"], str(row.get("category", "")), tuple(turns))
    )
  return questions[:limit] if limit else questions
