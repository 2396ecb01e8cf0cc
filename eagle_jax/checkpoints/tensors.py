"""Strict reading of weight files through a key table."""

import dataclasses
import json
import pathlib
import pickle
import re
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax.errors import InputError

SHOWN = 40  # mismatches in one message: all of a drafter's, not of a target's


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


def read_all(
  files: Iterable[pathlib.Path],
) -> Iterable[tuple[str, np.ndarray]]:
  """(name, array) of each tensor: of safetensors one in memory at a time, of a
  pickle the whole file."""
  for file in files:
    yield from _pickled(file) if file.suffix == ".bin" else _plain(file)


def _plain(file: pathlib.Path) -> Iterable[tuple[str, np.ndarray]]:
  try:
    with safetensors.safe_open(file, framework="numpy") as f:
      for name in f.keys():  # noqa: SIM118 (not a dict)
        yield name, f.get_tensor(name)
  except (safetensors.SafetensorError, OSError) as e:
    raise InputError(
      f"{file}: not a readable safetensors file ({e}): it may be truncated,"
      " copy it again"
    ) from None


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


def load(
  tensors: Iterable[tuple[str, np.ndarray]],
  rules: list[Rule],
  shapes: dict[str, tuple[int, ...]],
  ignored: str,
  put: Callable[[np.ndarray], object],
  where: str,
  reasons: dict[str, str],
) -> dict:
  """Named tensors -> nested parameters; all mismatches in one message.

  Args:
    tensors: (name, array) pairs, read one after another.
    rules: the key table; each name must match exactly one rule.
    shapes: the wanted path ("a/b/kernel") -> shape.
    ignored: a pattern of names that carry no parameter.
    put: called with each array in our layout (casts, moves to the device).
    where: file or folder, for messages.
    reasons: pattern of an unexpected name -> why it cannot be left out.
  """
  flat, problems = {}, []
  parts: dict[str, dict[int, np.ndarray]] = {}  # of stacks not whole yet

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
      flat[path] = put(array)
    else:
      stack[number] = array
      if len(stack) == shapes[path][0]:
        flat[path] = put(np.stack([stack.pop(i) for i in range(len(stack))]))
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
