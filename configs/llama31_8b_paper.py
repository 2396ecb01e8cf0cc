"""EAGLE-1 as published, for Llama-3.1-8B-Instruct.

The recipe of smollm2_eagle1_paper.py; the paper trained on 8 RTX 3090 in 1-2
days with the features dumped to disk (740 GB), here the target runs online.

  python train.py --config configs/llama31_8b_paper.py \\
      --config.data="('sharegpt.jsonl',)" \\
      --config.heldout="('heldout.jsonl',)"

Hardware: TPU v6e-8 (8 chips of 32 GB, one host). Weights are cut over fsdp:
2 GB of target and 0.5 GB of trained drafter with its moments a chip. Not run:
no figure is measured. Published for this target with an EAGLE-1 drafter and
EAGLE-2's tree: tau 4.05 on MT-bench at temperature 0.
"""

import dataclasses

from configs import smollm2_eagle1_paper
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return dataclasses.replace(
    smollm2_eagle1_paper.get_config(),
    target="meta-llama/Llama-3.1-8B-Instruct",
    out="runs/llama31_8b_paper",
    draft_vocab_size=128256,
    mesh=(1, 8, 1),
    remat=True,
    loss_chunk=128,
  )
