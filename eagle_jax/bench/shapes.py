"""Targets that have published drafters, as shapes: nothing is loaded.

Each drafter stands with the tree and the tau of its own publication
(arXiv 2503.01840, table 1: MT-bench, temperature 0). A tau is worth nothing
beside another head or tree than it was measured with.
"""

from eagle_jax.bench.lowering import Draft, Shapes
from eagle_jax.checkpoints.drafter_configs import for_target
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.speculation import tree

_SOURCE = "arXiv 2503.01840, MT-bench, temperature 0"


def _llama(**sizes) -> TargetConfig:
  return TargetConfig(
    family="llama",
    vocab_size=128256,
    tied_head=False,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-5,
    rope_theta=500000.0,
    max_positions=131072,
    rope_scaling=RopeScaling(
      "llama3",
      factor=8.0,
      original_max_positions=8192,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
    ),
    dtype="bfloat16",
    **sizes,
  )


def _shapes(
  name: str, target: TargetConfig, drafts: dict[str, Draft]
) -> Shapes:
  return Shapes(name, target, drafts, batch=1, capacity=2048, train=None)


def llama31_8b() -> Shapes:
  """EAGLE-2: EAGLE-1's head over the full vocabulary, M=60, L=6. EAGLE-3: a
  head of 32,000 rows; the paper keeps M and raises L to 8."""
  target = _llama(num_layers=32, hidden_size=4096, mlp_size=14336, num_heads=32)
  full = for_target(target, "eagle", target.vocab_size)
  reduced = for_target(target, "eagle3", 32000)
  return _shapes(
    "Llama-3.1-8B",
    target,
    {
      "eagle2": Draft(full, tree.dynamic(60, 6, 10), 4.05, _SOURCE),
      "eagle3": Draft(reduced, tree.dynamic(60, 8, 10), 6.13, _SOURCE),
    },
  )


def llama33_70b() -> Shapes:
  target = _llama(num_layers=80, hidden_size=8192, mlp_size=28672, num_heads=64)
  reduced = for_target(target, "eagle3", 32000)
  return _shapes(
    "Llama-3.3-70B",
    target,
    {"eagle3": Draft(reduced, tree.dynamic(48, 8, 10), 5.63, _SOURCE)},
  )


def qwen3_8b() -> Shapes:
  """No tau is published by the method's authors for this target."""
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
  reduced = for_target(target, "eagle3", 32000)
  return _shapes(
    "Qwen3-8B",
    target,
    {"eagle3": Draft(reduced, tree.dynamic(60, 8, 10), None, "not published")},
  )


PUBLISHED = {  # hub name -> shapes
  "meta-llama/Llama-3.1-8B-Instruct": llama31_8b,
  "meta-llama/Llama-3.3-70B-Instruct": llama33_70b,
  "Qwen/Qwen3-8B": qwen3_8b,
}


def of_target(name: str) -> Shapes:
  """Shapes by the target's hub name.

  Raises:
    InputError: a target that is not listed here.
  """
  if name not in PUBLISHED:
    raise InputError(
      f"target {name!r} has no published drafter listed: use"
      f" {', '.join(PUBLISHED)}, or a config whose get_config() gives"
      " eagle_jax.bench.lowering.Shapes"
    )
  return PUBLISHED[name]()
