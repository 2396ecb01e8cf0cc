"""Rows of each step, of this process's share, and their way to the devices."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from eagle_jax import sharding
from eagle_jax.errors import InputError
from eagle_jax.training import data
from eagle_jax.training.data import Packed
from eagle_jax.training.losses import Batch

FIELDS = ("tokens", "mask", "documents", "positions")


class Rows:
  """Iterates the rows of each step, batch_size / process_count at a time.

  Yields dicts of tokens, mask, documents, positions [rows, T], and row, the
  numbers of the rows. Its state is a small dict, as with Grain's iterators.
  """

  def __init__(
    self,
    packed: Packed,
    batch_size: int,
    seed: int,
    process_index: int,
    process_count: int,
    epochs: int,
  ):
    self.packed, self.batch_size, self.seed = packed, batch_size, seed
    size = batch_size // process_count
    self.mine = slice(process_index * size, (process_index + 1) * size)
    self.steps_an_epoch = len(packed) // batch_size
    self.steps = self.steps_an_epoch * epochs
    self.step = 0

  def __iter__(self):
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    if self.step >= self.steps:
      raise StopIteration
    epoch, within = divmod(self.step, self.steps_an_epoch)
    rows = data.order(len(self.packed), self.batch_size, self.seed, epoch)
    self.step += 1
    return take(self.packed, rows[within][self.mine])

  def get_state(self) -> dict:
    return {"step": self.step}

  def set_state(self, state: dict) -> None:
    self.step = state["step"]


def take(packed: Packed, rows: np.ndarray) -> dict[str, np.ndarray]:
  return {f: getattr(packed, f)[rows] for f in FIELDS} | {"row": rows}


def padded(rows: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
  """The rows and as many empty ones (document 0 throughout) as `size` wants."""
  missing = size - len(rows["row"])
  grow = lambda x: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
  return {name: grow(x) for name, x in rows.items()}


def share(mesh: Mesh, batch_size: int) -> tuple[int, int]:
  """(index, count): which share of each batch this process must read.

  Processes whose devices only cut tensors read the same rows:

    mesh (2, 1, 4) on 2 processes of 4 devices   share 0 of 2, share 1 of 2
    mesh (1, 1, 8) on 2 processes of 4 devices   share 0 of 1, both

  Raises:
    InputError: a batch that does not divide over the mesh, or devices in an
      order that gives a process rows from here and there.
  """
  place = sharding.batch(mesh, "train")
  parts = mesh.shape["data"] * mesh.shape["fsdp"]
  if batch_size % parts:
    raise InputError(
      f"a batch of {batch_size} rows does not divide over {parts} data and fsdp"
      " devices: make batch_size / accumulate a multiple of them"
    )
  held = place.addressable_devices_indices_map((batch_size,)).values()
  spans = sorted({i[0].indices(batch_size)[:2] for i in held})
  first, size = spans[0][0], sum(b - a for a, b in spans)
  if spans[-1][1] - first != size or first % size:
    raise InputError(
      f"the mesh's order of devices gives this process the rows {spans} of a"
      " batch, with gaps: use sizes that keep a process's devices together"
    )
  return first // size, batch_size // size


def to_devices(
  rows: dict[str, np.ndarray],
  kept: tuple[np.ndarray, np.ndarray] | None,
  dtype: str,
  place: NamedSharding,
) -> Batch:
  """This process's rows as part of the global batch.

  Args:
    kept: features and final features of the rows, if they were kept on disk.
  """
  put = lambda x: jax.make_array_from_process_local_data(place, x)
  fused, final = kept or (None, None)
  cast = lambda x: None if x is None else put(x.astype(dtype))
  return Batch(*(put(rows[f]) for f in FIELDS), cast(fused), cast(final))
