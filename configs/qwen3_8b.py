"""Qwen3-8B with a drafter of the EAGLE-3 layout, as shapes.

  python tpu/compile.py --config configs/qwen3_8b.py --topology v5e:2x4 \\
      --what plain,decode

No tau is published for this target by the method's authors, so the tool
prints the tau that breaks even instead of a ratio. The tree is EAGLE-3's for
8B targets.
"""

from eagle_jax.bench.lowering import Draft, Shapes, drafter_config
from eagle_jax.config import TargetConfig
from eagle_jax.speculation import tree


def get_config() -> Shapes:
  target = TargetConfig(
    family="qwen3",
    vocab_size=151936,
    num_layers=36,
    tied_head=False,
    hidden_size=4096,
    mlp_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-6,
    rope_theta=1000000.0,
    max_positions=40960,
    qk_norm=True,
    dtype="bfloat16",
  )
  return Shapes(
    name="Qwen3-8B",
    target=target,
    drafts={
      "eagle3": Draft(
        drafter_config(target, "eagle3", 32000),
        tree.dynamic(60, 8, 10),
        None,
        "none published",
      )
    },
    batch=1,
    capacity=2048,
    train=None,
  )
