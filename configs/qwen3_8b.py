"""Our recipe for Qwen3-8B: as llama31_8b.py.

  python train.py --config configs/qwen3_8b.py \\
      --config.data="('regenerated.jsonl',)" \\
      --config.heldout="('heldout.jsonl',)"

Let the target rewrite the answers in the mode that will be served (thinking or
not): a drafter of the other mode drafts worse. Hardware: TPU v6e-8 (8 chips of
32 GB, one host). Not run: no figure is measured.
"""

import dataclasses

from configs import llama31_8b
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return dataclasses.replace(
    llama31_8b.get_config(),
    target="Qwen/Qwen3-8B",
    out="runs/qwen3_8b",
  )
