"""Tokenised chats packed into rows of fixed length."""

import dataclasses
import pathlib

import numpy as np

from eagle_jax.training import chats
from eagle_jax.training.chats import Document


@dataclasses.dataclass(frozen=True)
class Packed:
  """Rows of several documents each, [rows, T]:

    tokens     a a a a b b b 0      documents  1 1 1 1 2 2 2 0
    positions  0 1 2 3 0 1 2 0      mask       0 0 1 1 0 1 1 0

  document 0 is padding.
  """

  tokens: np.ndarray
  mask: np.ndarray
  documents: np.ndarray
  positions: np.ndarray

  def __len__(self) -> int:
    return len(self.tokens)


def pack(documents: list[Document], T: int) -> Packed:
  """First-fit decreasing; documents longer than T are cut at T."""
  rows: list[list[Document]] = []
  room: list[int] = []
  for d in sorted(documents, key=lambda d: -len(d.ids)):
    size = min(len(d.ids), T)
    fit = next((i for i, left in enumerate(room) if left >= size), None)
    if fit is None:
      rows.append([])
      room.append(T)
      fit = len(rows) - 1
    rows[fit].append(d)
    room[fit] -= size
  packed = Packed(
    *(np.zeros((len(rows), T), t) for t in (np.int32, bool, np.int32, np.int32))
  )
  for r, row in enumerate(rows):
    at = 0
    for number, d in enumerate(row, 1):
      n = min(len(d.ids), T)
      here = slice(at, at + n)
      packed.tokens[r, here] = d.ids[:n]
      packed.mask[r, here] = d.mask[:n]
      packed.documents[r, here] = number
      packed.positions[r, here] = np.arange(n)
      at += n
  return packed


def read(files: list[pathlib.Path], tokenizer) -> list[Document]:
  """Read, tokenise and check chat files."""
  documents = [
    chats.tokenize(tokenizer, chat)
    for file in files
    for chat in chats.read_chats(file)
  ]
  chats.check_masks(documents, tokenizer, ", ".join(map(str, files)))
  return documents


def pack_windows(documents: list[Document], T: int, window: int) -> Packed:
  """Pack `window` documents at a time, so that appending to the data leaves
  the rows of earlier windows as they were (and their kept features good)."""
  parts = [
    pack(documents[i : i + window], T) for i in range(0, len(documents), window)
  ]
  return Packed(
    *(
      np.concatenate([getattr(part, f.name) for part in parts])
      for f in dataclasses.fields(Packed)
    )
  )


def draft_vocabulary(documents: list[Document], W: int, V: int) -> np.ndarray:
  """int32[W]: the most frequent supervised ids, ascending.

  When fewer than W ids were seen, the lowest unseen ids fill up.
  """
  ids = np.concatenate([d.ids[d.mask] for d in documents])
  counts = np.bincount(ids, minlength=V)
  # stable: equally frequent ids in ascending order
  best = np.argsort(-counts, kind="stable")[:W]
  return np.sort(best).astype(np.int32)


def order(rows: int, batch: int, seed: int, epoch: int) -> np.ndarray:
  """int[steps, batch]: the row numbers of each step of one epoch.

  A pure function of its arguments, so a run resumes from its step number.
  """
  rng = np.random.default_rng([seed, epoch])
  steps = rows // batch
  return rng.permutation(rows)[: steps * batch].reshape(steps, batch)
