"""EAGLE-1 as published, for Llama-3.3-70B-Instruct on many hosts.

The recipe of smollm2_eagle1_paper.py. The same command runs on each host:

  python train.py --config configs/llama33_70b_paper.py \\
      --config.data="('sharegpt.jsonl',)" \\
      --config.heldout="('heldout.jsonl',)" --config.out=/shared/llama33_70b

Hardware: TPU v6e-32 (32 chips of 32 GB, 8 hosts); `out` is a folder that all
hosts see. The target's 141 GB are cut over fsdp (8) and, within a host,
tensor (4): 4.4 GB a chip, and each host reads its own part. Not run: no figure
is measured. Published for a 70B target (Llama 2, EAGLE-1): tau 3.81 on
MT-bench at temperature 0.
"""

import dataclasses

from configs import llama31_8b_paper
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return dataclasses.replace(
    llama31_8b_paper.get_config(),
    target="meta-llama/Llama-3.3-70B-Instruct",
    out="runs/llama33_70b_paper",
    mesh=(1, 8, 4),
  )
