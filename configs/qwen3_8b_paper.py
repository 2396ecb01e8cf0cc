"""EAGLE-1 as published, for Qwen3-8B.

The recipe of smollm2_eagle1_paper.py. The drafter has no q/k norm, which the
published layout has no place for. ShareGPT answers carry no thinking; train on
chats of the mode that will be served.

  python train.py --config configs/qwen3_8b_paper.py \\
      --config.data="('sharegpt.jsonl',)" \\
      --config.heldout="('heldout.jsonl',)"

Hardware: TPU v6e-8 (8 chips of 32 GB, one host). Not run: no figure is
measured.
"""

import dataclasses

from configs import llama31_8b_paper
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return dataclasses.replace(
    llama31_8b_paper.get_config(),
    target="Qwen/Qwen3-8B",
    out="runs/qwen3_8b_paper",
    draft_vocab_size=151936,
  )
