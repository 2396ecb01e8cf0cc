"""Ablation of the drafter's inputs: the feature alone.

  python train.py --config configs/ablation_feature.py \\
      --config.data="('train-000.jsonl',)" --config.max_chats=1100 \\
      --config.heldout="('heldout.jsonl',)" --config.long_chats=cut \\
      --config.epochs=1

Data, steps, vocabulary, start and losses as in smollm2_eagle3.py; the four
ablation_*.py differ in `inputs` alone.

Hardware: 2 CPU cores, 15 minutes (682 steps) after the first of the four has
left the features on disk, which takes it 20 more. Expect, held out, 1.37 tokens
a pass of a chain of three (alpha .309 .156 .173 along it).
"""

from configs import smollm2_eagle3
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  config = smollm2_eagle3.get_config()
  config.inputs = "feature"
  config.out = "runs/ablation_feature"
  return config
