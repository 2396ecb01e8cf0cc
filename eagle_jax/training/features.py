"""The frozen target's features of training rows, kept on disk."""

import hashlib
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.models.target import Target
from eagle_jax.training.data import Packed
from eagle_jax.training.losses import target_features


class Cache:
  """Features of rows, a file each, made as rows are first asked for.

  For small setups: the target's pass costs more than the drafter's step, and
  every epoch after the first is free of it. float16 on disk; the taps are
  kept for both kinds of drafter. A file is named by what its row holds, so
  that runs share them, whatever other data they read.

    row  [ tap0 | tap1 | tap2 | final ]   D each, T times
  """

  def __init__(
    self,
    folder: pathlib.Path,
    target: Target,
    params: dict,
    fingerprint: str,
    kind: str,
  ):
    D = target.config.hidden_size
    key = json.dumps([fingerprint, target.taps]).encode()
    self.folder = folder / hashlib.sha256(key).hexdigest()[:16]
    self.folder.mkdir(parents=True, exist_ok=True)
    self.width = D * (len(target.taps) + 1)
    self.params = params
    self.run = jax.jit(lambda p, t, d, x: target_features(target, p, t, d, x))
    # what the drafter fuses: the taps, or the final feature
    self.fused = slice(0, -D) if kind == "eagle3" else slice(-D, None)
    self.final = slice(-D, None)

  def describe(self, packed: Packed) -> str:
    rows = len(packed)
    size = rows * packed.T * self.width * np.dtype(np.float16).itemsize
    return (
      f"features of {rows} rows in {self.folder}: {size / 1e9:.2f} GB in all"
    )

  def file(self, row: dict[str, np.ndarray]) -> pathlib.Path:
    held = row["tokens"].tobytes() + row["documents"].tobytes()
    return self.folder / f"{hashlib.sha256(held).hexdigest()[:24]}.npy"

  def _row(self, row: dict[str, np.ndarray]) -> np.ndarray:
    file = self.file(row)
    if file.exists():
      return np.load(file)
    parts = self.run(
      self.params, row["tokens"], row["documents"], row["positions"]
    )
    made = np.asarray(jnp.concatenate(parts, -1).astype(jnp.float16))[0]
    if not np.isfinite(made).all():
      raise InputError(
        f"features of row {row['row'][0]} do not fit float16: use"
        " features='online'"
      )
    # a killed run leaves no half-written row under the final name
    partly = file.with_suffix(f".{os.getpid()}")
    with partly.open("wb") as f:
      np.save(f, made)
    partly.replace(file)
    return made

  def __call__(self, rows: dict[str, np.ndarray]):
    """(what the drafter fuses, final feature) of rows of `Packed.take`."""
    one = lambda i: {name: a[i : i + 1] for name, a in rows.items()}
    kept = np.stack([self._row(one(i)) for i in range(len(rows["row"]))])
    kept = kept.astype(np.float32)
    return kept[..., self.fused], kept[..., self.final]
