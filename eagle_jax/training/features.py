"""The frozen target's features of training rows: computed, or kept on disk."""

import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.models import masks
from eagle_jax.models.target import Target
from eagle_jax.training.data import Packed


def target_features(target: Target, params: dict, tokens, documents, positions):
  """(taps or feature [B, T, ·], final feature [B, T, D]) of packed rows."""
  attend = masks.Attend(own=masks.Causal(documents))
  out, _ = target.apply({"params": params}, tokens, positions, attend, None)
  fused = out.taps if target.taps else out.feature
  return jax.lax.stop_gradient((fused, out.feature))


class Cache:
  """Features of every row, filled as rows are first asked for.

  For small setups: the target's pass costs more than the drafter's step, and
  every epoch after the first is free of it. float16 on disk.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    target: Target,
    params: dict,
    packed: Packed,
    name: str,
    say,
  ):
    D = target.config.hidden_size
    rows, T = packed.tokens.shape
    self.split = D * max(len(target.taps), 1)
    width = self.split + D if target.taps else D
    size = rows * T * width * 2
    key = hashlib.sha256(
      json.dumps([name, target.taps, T]).encode()
      + packed.tokens.tobytes()
      + packed.documents.tobytes()
    ).hexdigest()[:16]
    say(f"feature cache {folder / key}: {size / 1e9:.2f} GB for {rows} rows")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{key}.f16"
    mode = "r+" if file.exists() else "w+"
    self.data = np.memmap(file, np.float16, mode, shape=(rows, T, width))
    mark = folder / f"{key}.done"
    mode = "r+" if mark.exists() else "w+"
    self.done = np.memmap(mark, np.uint8, mode, shape=(rows,))
    self.packed, self.params = packed, params
    self.run = jax.jit(lambda p, t, d, x: target_features(target, p, t, d, x))
    self.tapped = bool(target.taps)

  def __call__(self, rows: np.ndarray):
    for r in rows[self.done[rows] == 0]:
      p = self.packed
      row = slice(r, r + 1)
      fused, final = self.run(
        self.params, p.tokens[row], p.documents[row], p.positions[row]
      )
      parts = [fused, final] if self.tapped else [final]
      made = np.asarray(jnp.concatenate(parts, -1).astype(jnp.float16))[0]
      if not np.isfinite(made).all():
        raise InputError(
          f"features of row {r} do not fit float16: use features='online'"
        )
      self.data[r] = made
      self.done[r] = 1
    kept = self.data[rows].astype(np.float32)
    if not self.tapped:
      return kept, kept
    return kept[..., : self.split], kept[..., self.split :]
