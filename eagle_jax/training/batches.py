"""Which rows of each batch a process reads, and their way to the devices."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from eagle_jax import sharding
from eagle_jax.errors import InputError
from eagle_jax.training.losses import Batch

FIELDS = ("tokens", "mask", "documents", "positions")


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
