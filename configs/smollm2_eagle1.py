"""A pure EAGLE-1 drafter for SmolLM2-135M-Instruct, for comparison.

Final feature only, the target's own head, no norms of its own; data, steps
and losses as in smollm2_eagle3.py, so that only the kind differs.

  python train.py --config configs/smollm2_eagle1.py \\
      --config.data="('train-000.jsonl',)" --config.max_chats=1100 \\
      --config.heldout="('heldout.jsonl',)" --config.out=runs/smollm2_eagle1

Hardware: 2 CPU cores, an hour or so. No figure is kept of it.
"""

from configs import smollm2_eagle3
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  config = smollm2_eagle3.get_config()
  config.kind = "eagle"
  config.out = "runs/smollm2_eagle1"
  return config
