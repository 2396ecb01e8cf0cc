"""Llama-3.1-8B and its published drafters, as shapes: nothing is loaded.

  python tpu/compile.py --config configs/llama31_8b.py --topology v6e:1x1 \\
      --what plain,decode

eagle2: the EAGLE-Llama-3.1-Instruct-8B head over the full vocabulary, M=60,
L=6, branch 10; tau 4.05, speed-up 3.16 (arXiv 2503.01840, MT-bench, T=0).
eagle3: the EAGLE3-LLaMA3.1-Instruct-8B head of 32,000 rows, M=60, L=8, branch
10; tau 6.13, speed-up 4.40 (the same table). Both speed-ups are of the
authors' GPUs.
"""

import dataclasses

from configs import smollm2_eagle3
from eagle_jax.bench.lowering import Draft, Shapes, drafter_config
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.speculation import tree
from eagle_jax.training.config import TrainConfig

ROPE = RopeScaling(
  "llama3",
  factor=8.0,
  original_max_positions=8192,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
)


def train() -> TrainConfig:
  """EAGLE-3's recipe, one row of 2,048 tokens for each of 16 chips."""
  return dataclasses.replace(
    smollm2_eagle3.get_config(),
    draft_vocab_size=32000,
    train_head=True,
    row_length=2048,
    batch_size=16,
    features="online",
    mesh=(1, 0, 1),
    remat=True,
    loss_chunk=256,
    unroll_steps=7,
    anchor_rows=0,
    feature_weight=0.0,
    vocabulary_weight=1.0,
    learning_rate=5e-5,
    schedule="linear",
    weight_decay=0.0,
    clip_norm=0.5,
    dtype="bfloat16",
  )


def get_config() -> Shapes:
  target = TargetConfig(
    family="llama",
    vocab_size=128256,
    num_layers=32,
    tied_head=False,
    hidden_size=4096,
    mlp_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-5,
    rope_theta=500000.0,
    max_positions=131072,
    rope_scaling=ROPE,
    dtype="bfloat16",
  )
  return Shapes(
    name="Llama-3.1-8B",
    target=target,
    drafts={
      "eagle2": Draft(
        drafter_config(target, "eagle", 128256),
        tree.dynamic(60, 6, 10),
        4.05,
        "arXiv 2503.01840, MT-bench, T=0",
      ),
      "eagle3": Draft(
        drafter_config(target, "eagle3", 32000),
        tree.dynamic(60, 8, 10),
        6.13,
        "arXiv 2503.01840, MT-bench, T=0",
      ),
    },
    batch=1,
    capacity=2048,
    train=train(),
  )
