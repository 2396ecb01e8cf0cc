"""Strict reading of safetensors files through a key table."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax.errors import InputError

BLOCK = 64 * 2**20  # bytes read at a time


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a key table: file name pattern -> parameter path.

  path may use the pattern's groups; transpose turns [out, in] into [in, out].
  """

  pattern: str
  path: str
  transpose: bool = False


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files of a Hugging Face folder, single or sharded."""
  index = folder / "model.safetensors.index.json"
  single = folder / "model.safetensors"
  if single.exists():
    return [single]
  if index.exists():
    try:
      names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
      raise InputError(
        f"{index}: not an index with a weight_map: copy it again"
      ) from None
    missing = [n for n in names if not (folder / n).exists()]
    if missing:
      raise InputError(
        f"{folder}: the index names {', '.join(missing)}, not in the folder:"
        " download the missing shards"
      )
    return [folder / n for n in names]
  hint = (
    "; it has pytorch_model.bin: convert it to safetensors first"
    if (folder / "pytorch_model.bin").exists()
    else ""
  )
  raise InputError(f"{folder}: no model.safetensors and no index file{hint}")


@contextlib.contextmanager
def _readable(file: pathlib.Path):
  try:
    yield
  except (safetensors.SafetensorError, OSError) as e:
    raise InputError(
      f"{file}: not a readable safetensors file ({e}): it may be truncated,"
      " copy it again"
    ) from None


def read_all(
  files: Iterable[pathlib.Path],
) -> Iterable[tuple[str, np.ndarray]]:
  """(name, array) of each tensor, one tensor in memory at a time."""
  for file in files:
    with _readable(file), safetensors.safe_open(file, framework="numpy") as f:
      for name in f.keys():  # noqa: SIM118 (not a dict)
        yield name, f.get_tensor(name)


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor on disk, of which any part can be read.

  part: the safetensors slice. transposed: seen with its two axes swapped.
  """

  file: pathlib.Path
  part: object
  transposed: bool = False

  @property
  def shape(self) -> tuple[int, ...]:
    shape = tuple(self.part.get_shape())
    return shape[::-1] if self.transposed else shape

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def T(self) -> "Stored":
    return dataclasses.replace(self, transposed=not self.transposed)

  def read(self, index: tuple[slice, ...], dtype) -> np.ndarray:
    """self[index] as a new array of another type.

    Read in blocks of rows, so that next to the result only one block is ever
    in memory.
    """
    within = [
      range(*i.indices(n)) for i, n in zip(index, self.shape, strict=True)
    ]
    out = np.empty([len(r) for r in within], dtype)
    into, rows = (
      (out.T, within[::-1]) if self.transposed else (out, list(within))
    )
    step = max(1, BLOCK // max(1, 4 * math.prod(map(len, rows[1:]))))
    rest = tuple(slice(r.start, r.stop) for r in rows[1:])
    for at in range(0, len(rows[0]), step):
      first = rows[0].start + at
      last = min(first + step, rows[0].stop)
      with _readable(self.file):
        block = self.part[(slice(first, last), *rest)]
      into[at : at + last - first] = block
    return out


def stored(files: Iterable[pathlib.Path]) -> Iterable[tuple[str, Stored]]:
  """(name, tensor) of each tensor, unread."""
  for file in files:
    with _readable(file):
      opened = safetensors.safe_open(file, framework="numpy")
    with opened as f:
      for name in f.keys():  # noqa: SIM118 (not a dict)
        yield name, Stored(file, f.get_slice(name))


def place(
  tensor: Stored, dtype: str, sharding: jax.sharding.Sharding | None
) -> jax.Array:
  """The tensor on its devices; each shard is read from the file by itself.

  Args:
    sharding: None = whole, on the default device.
  """
  dtype = jnp.dtype(dtype)
  whole = (slice(None),) * tensor.ndim
  if sharding is None:
    return jnp.asarray(tensor.read(whole, dtype))
  parts: dict[str, np.ndarray] = {}  # devices that hold the same part

  def part(index):
    key = str(index)
    if key not in parts:
      parts[key] = tensor.read(index, dtype)
    return parts[key]

  return jax.make_array_from_callback(tensor.shape, sharding, part)


def load(
  tensors: Iterable[tuple[str, np.ndarray | Stored]],
  rules: list[Rule],
  shapes: dict[str, tuple[int, ...]],
  ignored: str,
  put: Callable[[str, np.ndarray | Stored], object],
  where: str,
) -> dict:
  """Named tensors -> nested parameters; all mismatches in one message.

  Args:
    tensors: (name, tensor) pairs, one after another.
    rules: the key table; each name must match exactly one rule.
    shapes: the wanted path ("a/b/kernel") -> shape.
    ignored: a pattern of names that carry no parameter.
    put: called with the path and the tensor in our layout (reads, casts,
      moves to the device).
    where: file or folder, for messages.
  """
  flat, problems = {}, []
  for name, array in tensors:
    if re.fullmatch(ignored, name):
      continue
    hits = [(r, re.fullmatch(r.pattern, name)) for r in rules]
    hits = [(r, m) for r, m in hits if m]
    if len(hits) != 1:
      problems.append(f"unexpected {name} {tuple(array.shape)}")
      continue
    rule, match = hits[0]
    path = match.expand(rule.path)
    if rule.transpose and array.ndim == 2:
      array = array.T
    if path not in shapes:
      problems.append(f"unexpected {name} {tuple(array.shape)}")
    elif tuple(array.shape) != shapes[path]:
      problems.append(
        f"{name} has shape {tuple(array.shape)} in our layout, the config"
        f" wants {shapes[path]}"
      )
    elif path in flat:
      problems.append(f"{name} is there twice")
    else:
      flat[path] = put(path, array)
  problems += [f"missing {p}" for p in shapes if p not in flat]
  if problems:
    shown = "; ".join(problems[:8])
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise InputError(f"{where}: weights do not fit the config: {shown}{more}")
  return nest(flat)


def nest(flat: dict[str, object]) -> dict:
  tree: dict = {}
  for path, leaf in flat.items():
    node = tree
    *parents, last = path.split("/")
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = leaf
  return tree


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
  flat = {}
  for key, value in tree.items():
    path = f"{prefix}{key}"
    if isinstance(value, dict):
      flat |= flatten(value, path + "/")
    else:
      flat[path] = value
  return flat
