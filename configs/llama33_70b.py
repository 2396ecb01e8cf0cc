"""Our recipe for Llama-3.3-70B-Instruct on many hosts: as llama31_8b.py.

The same command runs on each host:

  python train.py --config configs/llama33_70b.py \\
      --config.data="('regenerated.jsonl',)" \\
      --config.heldout="('heldout.jsonl',)" --config.out=/shared/llama33_70b

Hardware: TPU v6e-32 (32 chips of 32 GB, 8 hosts); `out` is a folder that all
hosts see. Not run: no figure is measured. Published for EAGLE-3 on this
target: tau 5.63 on MT-bench at temperature 0.
"""

import dataclasses

from configs import llama31_8b
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return dataclasses.replace(
    llama31_8b.get_config(),
    target="meta-llama/Llama-3.3-70B-Instruct",
    out="runs/llama33_70b",
    mesh=(1, 8, 4),
  )
