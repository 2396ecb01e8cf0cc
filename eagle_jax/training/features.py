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
  every epoch after the first is free of it. float16 on disk; the taps are
  kept for both kinds of drafter, so that they share one cache.

    row  [ tap0 | tap1 | tap2 | final ]   D each, T times
  """

  def __init__(
    self,
    folder: pathlib.Path,
    target: Target,
    params: dict,
    packed: Packed,
    fingerprint: str,
    kind: str,
    say,
  ):
    D, taps = target.config.hidden_size, len(target.taps)
    rows, T = packed.tokens.shape
    width = D * (taps + 1)
    key = hashlib.sha256(
      json.dumps([fingerprint, target.taps, T]).encode()
      + packed.tokens.tobytes()
      + packed.documents.tobytes()
    ).hexdigest()[:16]
    file, mark = folder / f"{key}.f16", folder / f"{key}.done"
    size = rows * T * width * 2
    say(f"feature cache {file}: {size / 1e9:.2f} GB for {rows} rows")
    folder.mkdir(parents=True, exist_ok=True)
    kept = lambda f, dtype, shape: np.memmap(
      f, dtype, "r+" if f.exists() else "w+", shape=shape
    )
    self.data = kept(file, np.float16, (rows, T, width))
    self.done = kept(mark, np.uint8, (rows,))
    self.packed, self.params = packed, params
    self.run = jax.jit(lambda p, t, d, x: target_features(target, p, t, d, x))
    # what the drafter fuses: the taps, or the final feature
    self.fused = slice(0, -D) if kind == "eagle3" else slice(-D, None)
    self.final = slice(-D, None)

  def __call__(self, rows: np.ndarray):
    p = self.packed
    for r in rows[self.done[rows] == 0]:
      row = slice(r, r + 1)
      parts = self.run(
        self.params, p.tokens[row], p.documents[row], p.positions[row]
      )
      made = np.asarray(jnp.concatenate(parts, -1).astype(jnp.float16))[0]
      if not np.isfinite(made).all():
        raise InputError(
          f"features of row {r} do not fit float16: use features='online'"
        )
      self.data[r] = made
      self.done[r] = 1
    kept = self.data[rows]
    return (
      kept[..., self.fused].astype(np.float32),
      kept[..., self.final].astype(np.float32),
    )
