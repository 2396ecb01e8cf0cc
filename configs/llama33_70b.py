"""Llama-3.3-70B and its published drafter, as shapes: nothing is loaded.

  python tpu/compile.py --config configs/llama33_70b.py --topology v5p:2x2x2 \\
      --what plain,decode

eagle3: the EAGLE3-LLaMA3.3-Instruct-70B head of 32,000 rows, M=48, L=8,
branch 10; tau 5.63, speed-up 4.11 (arXiv 2503.01840, MT-bench, T=0), of the
authors' GPUs.
"""

import dataclasses

from configs import llama31_8b
from eagle_jax.bench.lowering import Draft, Shapes, drafter_config
from eagle_jax.speculation import tree


def get_config() -> Shapes:
  small = llama31_8b.get_config()
  target = dataclasses.replace(
    small.target,
    num_layers=80,
    hidden_size=8192,
    mlp_size=28672,
    num_heads=64,
  )
  return dataclasses.replace(
    small,
    name="Llama-3.3-70B",
    target=target,
    drafts={
      "eagle3": Draft(
        drafter_config(target, "eagle3", 32000),
        tree.dynamic(48, 8, 10),
        5.63,
        "arXiv 2503.01840, MT-bench, T=0",
      )
    },
    train=dataclasses.replace(small.train, batch_size=64),
  )
