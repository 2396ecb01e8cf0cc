"""Packed rows of tokenised chats, and the batches of a run."""

import dataclasses
import functools
from collections.abc import Sequence

import grain
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.training.chats import Document

READ_THREADS = 2
PREFETCH = 4  # batches read ahead
LONG = ("split", "cut")
SHORTEST = 3  # tokens of a piece that can carry loss: t, t + 1, t + 2


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens start .. stop - 1 of a document; most pieces are whole ones."""

  document: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Packed:
  """Rows of T tokens with several documents each, put together when read:

    tokens     a a a a b b b 0      documents  1 1 1 1 2 2 2 0
    positions  0 1 2 3 0 1 2 0      mask       0 0 1 1 0 1 1 0

  document 0 is padding.

  source: documents by number, in memory or on disk. plan: the pieces of each
  row. T: tokens of a row.
  """

  source: Sequence[Document]
  plan: list[list[Piece]]
  T: int

  def __len__(self) -> int:
    return len(self.plan)

  @functools.cached_property
  def padding(self) -> float:
    """Share of all rows that no token fills."""
    used = sum(p.stop - p.start for row in self.plan for p in row)
    return 1 - used / (len(self.plan) * self.T)

  def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of these numbers.

    Returns:
      tokens int32[b, T], mask bool[b, T], documents int32[b, T], positions
      int32[b, T], and row int32[b], the numbers.
    """
    shape = (len(rows), self.T)
    tokens, documents, positions = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for i, r in enumerate(rows):
      at = 0
      for number, p in enumerate(self.plan[r], 1):
        d, n = self.source[p.document], p.stop - p.start
        here = slice(at, at + n)
        tokens[i, here] = d.ids[p.start : p.stop]
        mask[i, here] = d.mask[p.start : p.stop]
        documents[i, here] = number
        positions[i, here] = np.arange(n)
        at += n
    return {
      "tokens": tokens,
      "mask": mask,
      "documents": documents,
      "positions": positions,
      "row": np.asarray(rows, np.int32),
    }

  def everything(self) -> dict[str, np.ndarray]:
    return self.take(np.arange(len(self)))


def pieces(lengths: Sequence[int], T: int, long: str) -> list[Piece]:
  """Documents as pieces of T tokens at most.

    long "split"   a a a a a a a, T 3   ->  a a a | a a a     (a: too short)
    long "cut"                          ->  a a a

  A window starts again at position 0 and sees nothing before it.
  """
  if long not in LONG:
    raise InputError(f"long_chats {long!r} must be one of {', '.join(LONG)}")
  return [
    Piece(i, start, min(start + T, n))
    for i, n in enumerate(lengths)
    for start in range(0, n if long == "split" else 1, T)
    if not start or n - start >= SHORTEST
  ]


def first_fit(parts: Sequence[Piece], T: int) -> list[list[Piece]]:
  """Rows of pieces by first-fit decreasing: each goes, longest first, to
  the first row with room for it."""
  rows: list[list[Piece]] = []
  room: list[int] = []
  for p in sorted(parts, key=lambda p: p.start - p.stop):
    size = p.stop - p.start
    fit = next((i for i, left in enumerate(room) if left >= size), None)
    if fit is None:
      rows.append([])
      room.append(T)
      fit = len(rows) - 1
    rows[fit].append(p)
    room[fit] -= size
  return rows


def pack_windows(
  source: Sequence[Document],
  lengths: Sequence[int],
  T: int,
  window: int,
  long: str,
) -> Packed:
  """Pack `window` documents at a time, so that appending to the data leaves
  the rows of earlier windows as they were (and their kept features good).

  Args:
    lengths: int[n], of the first n documents of `source`, which are packed.
  """
  rows: list[list[Piece]] = []
  for i in range(0, len(lengths), window):
    parts = pieces(lengths[i : i + window], T, long)
    moved = [dataclasses.replace(p, document=p.document + i) for p in parts]
    rows += first_fit(moved, T)
  return Packed(source, rows, T)


def bucket_waste(packed: Packed) -> float:
  """Padding share if each piece were a row of the next power of two.

  What packing is measured against: `python -m eagle_jax.training.dataset`
  prints both.
  """
  sizes = np.asarray([p.stop - p.start for row in packed.plan for p in row])
  buckets = np.minimum(2 ** np.ceil(np.log2(sizes)), packed.T)
  return float(1 - sizes.sum() / buckets.sum())


def draft_vocabulary(counts: np.ndarray, W: int) -> np.ndarray:
  """int32[W]: the most frequent supervised ids, ascending.

  When fewer than W ids were seen, the lowest unseen ids fill up.

  Args:
    counts: int[V], how often each id carries loss.
  """
  # stable: equally frequent ids in ascending order
  best = np.argsort(-counts, kind="stable")[:W]
  return np.sort(best).astype(np.int32)


def iterator(
  packed: Packed,
  batch_size: int,
  seed: int,
  share: int,
  shares: int,
  epochs: int,
) -> grain.DatasetIterator:
  """Batches of packed rows in a seeded order, with a position to keep.

  The order of the global batches depends on the seed alone; each share
  of every one is read apart (2 shares, global batch 4):

    epoch 0   [ 4 6 9 7 ] [ 5 3 1 8 ]   2 0 are left out of this epoch
    share 0   [ 4 6     ] [ 5 3     ]
    share 1   [     9 7 ] [     1 8 ]

  `get_state()` is a small JSON dict, the same in every process;
  `set_state()` goes on from it.

  Args:
    batch_size: global rows a step, a multiple of `shares` and at most the
      rows there are.
    share, shares: which of how many parts of a batch to read. Processes that
      only cut tensors between them read the same one.

  Yields:
    tokens int32[b, T], mask bool[b, T], documents and positions int32[b, T],
    and row int32[b], the rows' numbers in `packed`; b is the process's share.
  """
  b = batch_size // shares
  mine = slice(share * b, (share + 1) * b)
  batches = (
    grain.MapDataset.range(len(packed))
    .seed(seed)
    .shuffle()
    # before repeat: the remainder is dropped, and the order drawn, per epoch
    .batch(batch_size, drop_remainder=True)
    .repeat(epochs)
    .map(lambda rows: packed.take(rows[mine]))
  )
  options = grain.ReadOptions(
    num_threads=READ_THREADS, prefetch_buffer_size=PREFETCH
  )
  return iter(batches.to_iter_dataset(options))
