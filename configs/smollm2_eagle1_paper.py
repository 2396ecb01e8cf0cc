"""EAGLE-1 as published (arXiv 2401.15077), for SmolLM2-135M-Instruct.

One step, feature and vocabulary loss (1 : 0.1), the target's whole
vocabulary, noise on the features, a random start, clipping by value, linear
decay after 2,000 steps of warm-up, batches of 32 rows of 2,048 tokens, 20
epochs of 68k ShareGPT chats as they are (answers not the target's own). What
differs: several chats are packed into a row, each seeing only itself.

  python train.py --config configs/smollm2_eagle1_paper.py \\
      --config.data="('sharegpt.jsonl',)" \\
      --config.heldout="('heldout.jsonl',)"

Hardware: one accelerator of 16 GB, or more (`mesh` takes what is there). Not
run: no figure is measured. The paper reports a held-out top-1 of about .8 on
7B targets; a 135M target with unlike answers gives less.
"""

import dataclasses

from configs import smollm2_eagle3
from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return dataclasses.replace(
    smollm2_eagle3.get_config(),
    out="runs/smollm2_eagle1_paper",
    kind="eagle",
    draft_vocab_size=49152,
    init="random",
    row_length=2048,
    batch_size=32,
    epochs=20,
    features="online",
    accumulate=4,
    loss_chunk=256,
    unroll_steps=1,
    anchor_rows=0,
    feature_noise=0.1,
    learning_rate=3e-5,
    schedule="linear",
    warmup_steps=2000,
    clip_norm=0.0,
    clip_value=0.5,
    eval_every=1000,
    eval_rows=64,
    decode_every=5000,
    decode_prompts=8,
    save_every=500,
    dtype="bfloat16",
  )
