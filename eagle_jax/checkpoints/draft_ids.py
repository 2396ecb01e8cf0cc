"""`d2t` and `t2d` of a drafter file <-> target ids of the draft vocabulary.

  target id     0  1  2  3  4  5        V = 6
  t2d           .  1  .  1  1  .        which ids are in the draft vocabulary
  draft id         0     1  2           W = 3
  d2t              1     2  2           offsets: target id - draft id

Published files hold these with known faults: ids instead of offsets, tables
never filled, one of the two left out. `t2d` is the witness: where it marks W
ids, they are the vocabulary, in ascending order. Inside, an id is an id.
"""

import numpy as np

from eagle_jax.errors import InputError


def _valid(ids: np.ndarray, V: int) -> bool:
  return ids.min() >= 0 and ids.max() < V and len(set(ids)) == len(ids)


def read(
  d2t: np.ndarray | None, t2d: np.ndarray | None, W: int, V: int, where: str
) -> np.ndarray:
  """int32[W]: the target id of each draft id.

  Raises:
    InputError: tables that name no vocabulary, or two different ones.
  """
  for name, table, size in (("d2t", d2t, W), ("t2d", t2d, V)):
    if table is not None and table.shape != (size,):
      raise InputError(
        f"{where}: {name} has shape {table.shape}, the config wants ({size},)"
      )
  marked = np.flatnonzero(t2d) if t2d is not None else np.arange(0)
  if marked.size in (0, V):  # as the buffers are made: never filled
    marked = None
  if marked is not None and marked.size != W:
    raise InputError(
      f"{where}: t2d marks {marked.size} ids, draft_vocab_size is {W}: the"
      " draft vocabulary is larger than the tokens it was made from, or the"
      " file is of another drafter"
    )
  if W == V:
    # The tables say nothing then; files have zeros, arange, or none.
    if d2t is None or not d2t.any() or np.array_equal(d2t, np.arange(W)):
      return np.arange(V, dtype=np.int32)
  elif d2t is None or not d2t.any():
    if marked is None:
      state = "missing" if d2t is None else "all zero (never filled)"
      raise InputError(
        f"{where}: d2t is {state} and t2d does not tell either, but"
        f" draft_vocab_size {W} is below the vocabulary {V}: the draft ids"
        " cannot be told"
      )
    return marked.astype(np.int32)
  table = d2t.astype(np.int64)
  offsets, ids = np.arange(W) + table, table
  if marked is not None:
    for found in (offsets, ids):
      if np.array_equal(np.sort(found), marked):
        return found.astype(np.int32)
    raise InputError(
      f"{where}: t2d marks {W} ids that are not the ones d2t gives, read as"
      " offsets (target id - draft id) or as ids"
    )
  if np.array_equal(table, np.arange(W)):
    raise InputError(
      f"{where}: d2t counts 0..{W - 1}: as ids it was never filled, as offsets"
      " it skips every other id, and there is no t2d to tell"
    )
  if _valid(offsets, V):
    return offsets.astype(np.int32)
  hint = (
    "it holds target ids: subtract 0, 1, 2, .. from it"
    if _valid(ids, V) and (np.diff(ids) > 0).all()
    else "it must hold offsets (target id - draft id)"
  )
  again = len(offsets) - len(set(offsets))
  raise InputError(
    f"{where}: d2t gives target ids {offsets.min()}..{offsets.max()} of 0.."
    f"{V - 1}, {again} of them twice: {hint}"
  )


def tables(vocabulary: np.ndarray, V: int) -> dict[str, np.ndarray]:
  """d2t int64[W] and t2d bool[V]; none where the vocabulary is whole."""
  ids = np.asarray(vocabulary, np.int64)
  if np.array_equal(ids, np.arange(V)):
    return {}
  marked = np.zeros(V, bool)
  marked[ids] = True
  return {"d2t": ids - np.arange(len(ids)), "t2d": marked}
