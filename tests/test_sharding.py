"""Each parameter has one rule; a mesh computes what one device computes."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
import tiny
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from refusals import refused

from eagle_jax import sharding
from eagle_jax.checkpoints import drafters, hf_target, tensors
from eagle_jax.config import DrafterConfig
from eagle_jax.training import batches


def mesh(*sizes) -> AbstractMesh:
  return AbstractMesh(sizes, sharding.AXES)


def drafter_config(target, kind: str, **changes) -> DrafterConfig:
  names = ("hidden_size", "mlp_size", "num_heads", "num_kv_heads", "head_size")
  names += ("norm_eps", "rope_theta", "max_positions", "vocab_size")
  fields = {n: getattr(target, n) for n in names}
  return DrafterConfig(
    **fields
    | {
      "kind": kind,
      "draft_vocab_size": 48,
      "taps": (2, 4, 5) if kind == "eagle3" else (),
    }
    | changes
  )


def smollm2():
  return tiny.target_config(
    vocab_size=49152,
    num_layers=30,
    hidden_size=576,
    mlp_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
  )


def specs_of(module, config, sizes, preset="train", say=lambda line: None):
  shapes = {
    path: jax.ShapeDtypeStruct(shape, "float32")
    for path, shape in module.parameter_shapes(config).items()
  }
  axes = sharding.table(config, mesh(*sizes), preset, say)
  return tensors.flatten(sharding.specs(tensors.nest(shapes), axes)), shapes


@pytest.mark.parametrize("preset", sharding.PRESETS)
@pytest.mark.parametrize(
  ("module", "config"),
  [
    (hf_target, smollm2()),
    (hf_target, tiny.target_config(tied_head=False, qkv_bias=True)),
    (hf_target, tiny.target_config(qk_norm=True)),
    (drafters, drafter_config(tiny.target_config(), "eagle", fc_bias=True)),
    (drafters, drafter_config(smollm2(), "eagle3", qkv_bias=True)),
  ],
)
def test_every_parameter_has_one_rule_and_divides(module, config, preset):
  """`specs` raises on none or two; each dimension divides over its axes."""
  sizes = (2, 4, 2)
  found, shapes = specs_of(module, config, sizes, preset)
  assert found.keys() == shapes.keys()
  for path, spec in found.items():
    for size, axes in zip(shapes[path].shape, spec, strict=True):
      assert size % sharding.ways(mesh(*sizes), axes) == 0, path


def test_query_groups_stay_with_their_kv_head():
  config = tiny.target_config(num_heads=32, num_kv_heads=8, mlp_size=64)
  q, k = "layers_0/self_attn/q_proj/kernel", "layers_0/self_attn/k_proj/kernel"
  found, _ = specs_of(hf_target, config, (1, 1, 8))
  assert found[q] == found[k] == P("fsdp", "tensor")
  said = []
  found, _ = specs_of(hf_target, config, (1, 1, 16), say=said.append)
  assert (found[q], found[k]) == (P("fsdp", "tensor"), P("fsdp", None))
  (line,) = said
  assert "8 kv_heads do not divide over 16" in line


def test_attention_of_nine_heads_stays_whole():
  """SmolLM2's 9 query and 3 kv heads on 4 ways; mlp and vocabulary are cut."""
  said = []
  found, _ = specs_of(hf_target, smollm2(), (1, 2, 4), say=said.append)
  at = lambda name: found[f"layers_29/{name}/kernel"]
  assert at("self_attn/q_proj") == at("self_attn/v_proj") == P("fsdp", None)
  assert at("self_attn/o_proj") == P(None, "fsdp")
  assert at("mlp/gate_proj") == P("fsdp", "tensor")
  assert at("mlp/down_proj") == P("tensor", "fsdp")
  assert found["embed_tokens/embedding"] == P("tensor", "fsdp")
  (line,) = said
  assert "9 heads do not divide over 4" in line


def test_a_vocabulary_that_does_not_divide_stays_whole():
  config = tiny.target_config(vocab_size=63, tied_head=False)
  said = []
  found, _ = specs_of(hf_target, config, (1, 1, 2), say=said.append)
  assert found["embed_tokens/embedding"] == P(None, "fsdp")
  assert found["lm_head/kernel"] == P("fsdp", None)
  assert len(said) == 2
  assert "63 vocab do not divide over 2" in said[1]


def test_experts_are_cut_like_one_mlp():
  shape = lambda *s: jax.ShapeDtypeStruct(s, "float32")
  mlp = {
    "gate_proj": {"kernel": shape(4, 32, 48)},
    "down_proj": {"kernel": shape(4, 48, 32)},
    "router": {"kernel": shape(32, 4)},
  }
  axes = sharding.table(
    tiny.target_config(), mesh(1, 2, 2), "train", lambda line: None
  )
  found = sharding.specs({"layers_0": {"mlp": mlp}}, axes)["layers_0"]["mlp"]
  assert found["gate_proj"]["kernel"] == P(None, "fsdp", "tensor")
  assert found["down_proj"]["kernel"] == P(None, "tensor", "fsdp")
  assert found["router"]["kernel"] == P("fsdp", None)


def test_parameters_without_one_rule_are_named(monkeypatch):
  axes = sharding.table(
    tiny.target_config(), mesh(1, 1, 1), "train", lambda line: None
  )
  leaf = lambda n: jax.ShapeDtypeStruct((2,) * n, "float32")
  with refused("odd/kernel (2 dim", "norm/scale (3 dim", "matches 0 rules"):
    sharding.specs(
      {"odd": {"kernel": leaf(2)}, "norm": {"scale": leaf(3)}}, axes
    )
  twice = (*sharding.RULES, (r"norm/.*", ("norm",)))
  monkeypatch.setattr(sharding, "RULES", twice)
  with refused("norm/scale", "matches 2 rules"):
    sharding.specs({"norm": {"scale": leaf(1)}}, axes)


@pytest.mark.parametrize("field", ["hidden_size", "mlp_size"])
def test_a_width_that_does_not_divide_is_refused(field):
  config = tiny.target_config(**{field: 50})
  sizes = (1, 4, 1) if field == "hidden_size" else (1, 1, 4)
  with refused(f"{field} 50", "over 4", "another mesh"):
    sharding.table(config, mesh(*sizes), "train", lambda line: None)


@pytest.mark.parametrize(
  ("sizes", "words"),
  [
    ((1, 2), ["three sizes"]),
    ((0, 0, 1), ["one of them 0"]),
    ((-1, 1, 1), ["three sizes"]),
    ((3, 1, 1), ["does not fit 1 devices"]),
  ],
)
def test_mesh_sizes_must_fit_the_devices(sizes, words):
  with refused("mesh", *words):
    sharding.make_mesh(sizes, jax.devices()[:1])


def test_a_training_batch_must_divide_over_data_and_fsdp():
  with refused("a batch of 3 rows does not divide over 2", "a multiple"):
    batches.share(mesh(1, 2, 4), 3)


def test_on_eight_devices():
  """eight_devices.py, in a process that has them."""
  here = pathlib.Path(__file__).parent
  flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-n0", "-x", here / "eight_devices.py"],
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    cwd=here.parent,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-5000:]
