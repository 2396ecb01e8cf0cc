"""Tokenised chats packed into rows of fixed length."""

import dataclasses
import pathlib

import grain
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.training import chats
from eagle_jax.training.chats import Document

READ_THREADS = 2
PREFETCH = 4  # batches read ahead


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

  def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of these numbers, and the numbers as `row`."""
    fields = {
      f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(Packed)
    }
    return fields | {"row": np.asarray(rows, np.int32)}


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


def iterator(
  packed: Packed,
  batch_size: int,
  seed: int,
  process_index: int,
  process_count: int,
  epochs: int,
) -> grain.DatasetIterator:
  """Batches of packed rows in a seeded order, with a position to keep.

  The order of the global batches depends on the seed alone; each process
  reads its share of every one (2 processes, global batch 4):

    epoch 0   [ 4 6 9 7 ] [ 5 3 1 8 ]   2 0 are left out of this epoch
    process 0 [ 4 6     ] [ 5 3     ]
    process 1 [     9 7 ] [     1 8 ]

  `get_state()` is a small JSON dict, the same in every process;
  `set_state()` goes on from it.

  Args:
    batch_size: global rows a step, a multiple of process_count.

  Yields:
    tokens int32[b, T], mask bool[b, T], documents and positions int32[b, T],
    and row int32[b], the rows' numbers in `packed`; b is the process's share.
  """
  if batch_size % process_count:
    raise InputError(
      f"batch_size {batch_size} is not a multiple of the {process_count}"
      " processes that share it"
    )
  if len(packed) < batch_size:
    raise InputError(
      f"batch_size {batch_size} is more than the {len(packed)} rows of data"
    )
  b = batch_size // process_count
  share = slice(process_index * b, (process_index + 1) * b)
  batches = (
    grain.MapDataset.range(len(packed))
    .seed(seed)
    .shuffle()
    # before repeat: the remainder is dropped, and the order drawn, per epoch
    .batch(batch_size, drop_remainder=True)
    .repeat(epochs)
    .map(lambda rows: packed.take(rows[share]))
  )
  options = grain.ReadOptions(
    num_threads=READ_THREADS, prefetch_buffer_size=PREFETCH
  )
  return iter(batches.to_iter_dataset(options))
