"""A pure EAGLE-1 drafter for SmolLM2-135M-Instruct, for comparison.

Final feature only, the target's own head, no norms of its own; data, steps
and losses as in smollm2_eagle3.py, so that only the kind differs.

  python train.py --config configs/smollm2_eagle1.py \\
      --config.data="('train-000.jsonl',)" --config.max_chats=1100 \\
      --config.heldout="('heldout.jsonl',)" --config.long_chats=cut \\
      --config.out=runs/smollm2_eagle1

Hardware: 2 CPU cores, an hour or so. Expect, held out, 1.66 tokens a pass of a
chain of three (alpha .416 .394 .467 along it); smollm2_eagle3.py reached 1.71
on the same data. eagle_jax/drafters/smollm2-135m-eagle1 is what came out.
"""

from configs import smollm2_eagle3
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  config = smollm2_eagle3.get_config()
  config.kind = "eagle"
  config.out = "runs/smollm2_eagle1"
  return config
