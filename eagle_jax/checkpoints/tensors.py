"""Strict reading of weight files through a key table."""

import contextlib
import dataclasses
import json
import math
import pathlib
import pickle
import re
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import traverse_util

from eagle_jax.errors import InputError

SHOWN = 40  # mismatches in one message: all of a drafter's, not of a target's
BLOCK = 64 * 2**20  # bytes read at a time


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a key table: file name pattern -> parameter path.

  path may use the pattern's groups; transpose turns [out, in] into [in, out].
  number: the group that counts the parts of one parameter (experts), which
  are stacked on a leading axis; 0 = the tensor is the whole parameter.
  """

  pattern: str
  path: str
  transpose: bool = False
  number: int = 0


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
  """The weight files of a model folder, single or sharded; safetensors first,
  else PyTorch's pickles."""
  for single in ("model.safetensors", "pytorch_model.bin"):
    index = folder / f"{single}.index.json"
    if (folder / single).exists():
      return [folder / single]
    if index.exists():
      return [folder / name for name in _shards(index)]
  raise InputError(
    f"{folder}: no model.safetensors, no pytorch_model.bin and no index file of"
    " either: give the folder of a model"
  )


def _shards(index: pathlib.Path) -> list[str]:
  """The file names in an index, all of which must be there."""
  try:
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
  except (ValueError, KeyError, TypeError, AttributeError):
    raise InputError(
      f"{index}: not an index with a weight_map: copy it again"
    ) from None
  missing = [n for n in names if not (index.parent / n).exists()]
  if missing:
    raise InputError(
      f"{index.parent}: the index names {', '.join(missing)}, not in the"
      " folder: download the missing shards"
    )
  return names


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
  """(name, array) of each tensor: of safetensors one in memory at a time, of a
  pickle the whole file."""
  for file in files:
    if file.suffix == ".bin":
      yield from _pickled(file)
      continue
    with _readable(file), safetensors.safe_open(file, framework="numpy") as f:
      for name in f.keys():  # noqa: SIM118 (not a dict)
        yield name, f.get_tensor(name)


def _pickled(file: pathlib.Path) -> Iterable[tuple[str, np.ndarray]]:
  """A PyTorch file; weights only, so that no code in it can run."""
  try:
    import torch
  except ImportError:
    raise InputError(
      f"{file} is a PyTorch file, and torch is not installed: pip install torch"
      " (a CPU build will do), or convert the file to safetensors elsewhere"
    ) from None
  try:
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    # numpy has no bfloat16 of its own: hand its bits to ml_dtypes
    arrays = {
      name: tensor.view(torch.uint16).numpy().view(jnp.bfloat16)
      if tensor.dtype == torch.bfloat16
      else tensor.numpy()
      for name, tensor in loaded.items()
    }
  except (
    pickle.UnpicklingError,
    RuntimeError,
    OSError,
    EOFError,
    AttributeError,
  ) as e:
    raise InputError(
      f"{file}: not a readable PyTorch file of tensors"
      f" ({str(e).splitlines()[0] if str(e) else type(e).__name__}): it may be"
      " truncated, copy it again"
    ) from None
  yield from arrays.items()


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


@dataclasses.dataclass(frozen=True)
class Held:
  """A tensor in memory, read like a `Stored` one."""

  array: np.ndarray

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape

  @property
  def ndim(self) -> int:
    return self.array.ndim

  @property
  def T(self) -> "Held":
    return Held(self.array.T)

  def read(self, index: tuple[slice, ...], dtype) -> np.ndarray:
    return np.ascontiguousarray(self.array[index].astype(dtype))


@dataclasses.dataclass(frozen=True)
class Stack:
  """Tensors of one shape on a new leading axis (experts), none read yet."""

  parts: tuple["Stored | Held", ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return (len(self.parts), *self.parts[0].shape)

  @property
  def ndim(self) -> int:
    return len(self.shape)

  def read(self, index: tuple[slice, ...], dtype) -> np.ndarray:
    return np.stack([p.read(index[1:], dtype) for p in self.parts[index[0]]])


def stored(
  files: Iterable[pathlib.Path],
) -> Iterable[tuple[str, Stored | Held]]:
  """(name, tensor) of each tensor, unread; a pickle is read whole."""
  for file in files:
    if file.suffix == ".bin":
      for name, array in _pickled(file):
        yield name, Held(array)
      continue
    with _readable(file):
      opened = safetensors.safe_open(file, framework="numpy")
    with opened as f:
      for name in f.keys():  # noqa: SIM118 (not a dict)
        yield name, Stored(file, f.get_slice(name))


def place(
  tensor: Stored | Held | Stack,
  dtype: str,
  sharding: jax.sharding.Sharding | None,
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
  tensors: Iterable[tuple[str, np.ndarray | Stored | Held]],
  rules: list[Rule],
  shapes: dict[str, tuple[int, ...]],
  ignored: str,
  put: Callable[[str, np.ndarray | Stored | Held | Stack], object],
  where: str,
  reasons: dict[str, str],
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
    reasons: pattern of an unexpected name -> why it cannot be left out.
  """
  flat, problems = {}, []
  parts: dict[str, dict[int, Stored | Held]] = {}  # of stacks not whole yet

  def unexpected(name: str, array: np.ndarray) -> str:
    why = [r for p, r in reasons.items() if re.fullmatch(p, name)]
    line = f"unexpected {name} {tuple(array.shape)}"
    return f"{line} ({why[0]})" if why else line

  for name, array in tensors:
    if re.fullmatch(ignored, name):
      continue
    hits = [(r, re.fullmatch(r.pattern, name)) for r in rules]
    hits = [(r, m) for r, m in hits if m]
    if len(hits) != 1:
      problems.append(unexpected(name, array))
      continue
    rule, match = hits[0]
    path = match.expand(rule.path)
    if rule.transpose and array.ndim == 2:
      array = array.T
    wanted = shapes.get(path, ())
    number = int(match[rule.number]) if rule.number else 0
    stack = parts.setdefault(path, {}) if rule.number else None
    if path not in shapes or (rule.number and number >= wanted[0]):
      problems.append(unexpected(name, array))
      continue
    wanted = wanted[1:] if rule.number else wanted
    if tuple(array.shape) != wanted:
      problems.append(
        f"{name} has shape {tuple(array.shape)} in our layout, the config"
        f" wants {wanted}"
      )
    elif path in flat or (stack is not None and number in stack):
      problems.append(f"{name} is there twice")
    elif stack is None:
      flat[path] = put(path, array)
    else:
      stack[number] = array
      if len(stack) == shapes[path][0]:
        whole = Stack(tuple(stack.pop(i) for i in range(len(stack))))
        flat[path] = put(path, whole)
  for path in shapes:
    if path not in flat:
      some = f" ({len(parts[path])} of them there)" if parts.get(path) else ""
      problems.append(f"missing {path}{some}")
  if problems:
    shown = "; ".join(problems[:SHOWN])
    left = len(problems) - SHOWN
    more = f"; and {left} more" if left > 0 else ""
    raise InputError(f"{where}: weights do not fit the config: {shown}{more}")
  return nest(flat)


def nest(flat: dict[str, object]) -> dict:
  """{"a/b": leaf} as {"a": {"b": leaf}}."""
  return traverse_util.unflatten_dict(flat, sep="/")


def flatten(tree: dict) -> dict[str, object]:
  """{"a": {"b": leaf}} as {"a/b": leaf}."""
  return traverse_util.flatten_dict(tree, sep="/")
