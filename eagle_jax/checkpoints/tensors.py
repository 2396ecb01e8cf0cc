"""Strict reading of safetensors files through a key table."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterable

import numpy as np
import safetensors

from eagle_jax.errors import InputError


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


def read_all(
  files: Iterable[pathlib.Path],
) -> Iterable[tuple[str, np.ndarray]]:
  """(name, array) of each tensor, one tensor in memory at a time."""
  for file in files:
    try:
      with safetensors.safe_open(file, framework="numpy") as f:
        for name in f.keys():  # noqa: SIM118 (not a dict)
          yield name, f.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as e:
      raise InputError(
        f"{file}: not a readable safetensors file ({e}): it may be truncated,"
        " copy it again"
      ) from None


def load(
  tensors: Iterable[tuple[str, np.ndarray]],
  rules: list[Rule],
  shapes: dict[str, tuple[int, ...]],
  ignored: str,
  put: Callable[[np.ndarray], object],
  where: str,
) -> dict:
  """Named tensors -> nested parameters; all mismatches in one message.

  Args:
    tensors: (name, array) pairs, read one after another.
    rules: the key table; each name must match exactly one rule.
    shapes: the wanted path ("a/b/kernel") -> shape.
    ignored: a pattern of names that carry no parameter.
    put: called with each array in our layout (casts, moves to the device).
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
      flat[path] = put(array)
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
