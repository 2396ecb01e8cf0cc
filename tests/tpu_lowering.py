"""Compiles the decode cycle for a TPU, on a machine without one.

`libtpu` holds the TPU compiler and compiles for a topology that is only
described. Weights and state are shapes with shardings: nothing is computed
and no weight is in memory. One JSON line a program:

    PYTHONPATH=. python tests/tpu_lowering.py --shape llama31_8b

Bytes and counts are per chip; flops and bytes accessed count a loop's body
once. With several chips the weights are split Megatron-style and XLA adds the
collectives:

  q k v gate up   [in, out / chips]     embed head  [V / chips, D]
  o down fc       [in / chips, out]     caches      [B, K / chips, S, H]
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.checkpoints import tensors
from eagle_jax.config import DrafterConfig, RopeScaling, TargetConfig
from eagle_jax.models import masks
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.speculation import decoding, engine, tree
from eagle_jax.speculation import state as states

# Without these, libtpu asks the cloud who it is, JAX looks for a TPU, and two
# compilations at a time meet at the lock that guards a real one.
ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}

RULES = (  # parameter path -> spec; exactly one matches
  (r"embed_tokens/embedding", P("chips", None)),
  (r"lm_head/kernel", P(None, "chips")),
  (r".*(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel", P(None, "chips")),
  (r".*(o_proj|down_proj)/kernel|fc/kernel", P("chips", None)),
  (r".*norm/scale", P()),
)
CACHE_SPEC = P(None, "chips", None, None)

# What would stop the device for the host, as optimised HLO writes it. Memory
# space 5 is the host's.
HOST = re.compile(
  r"\b(?:infeed|outfeed|send|recv)(?:-done)?\("
  r"|is_host_transfer=true|MoveToHost|S\(5\)"
  r"|custom_call_target=\"[^\"]*callback"
)


@dataclasses.dataclass(frozen=True)
class Shape:
  """A model pair and the sizes of a decode program."""

  target: TargetConfig
  spec: tree.TreeSpec
  batch: int
  capacity: int
  chips: int


def shapes() -> dict[str, Shape]:
  tiny = TargetConfig(
    family="llama",
    vocab_size=1024,
    num_layers=2,
    tied_head=False,
    hidden_size=256,
    mlp_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_size=128,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=256,
    dtype="bfloat16",
  )
  llama = TargetConfig(
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
    rope_scaling=RopeScaling(
      "llama3",
      factor=8.0,
      original_max_positions=8192,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
    ),
    dtype="bfloat16",
  )
  return {
    "tiny": Shape(tiny, tree.dynamic(16, 3, 4), 2, 256, 1),
    # 16 GB of weights: more than one v5e chip holds
    "llama31_8b": Shape(llama, tree.dynamic(60, 6, 10), 1, 2048, 4),
  }


def drafter_config(target: TargetConfig) -> DrafterConfig:
  """An "eagle" drafter of the target's layer shape, with its vocabulary."""
  shared = {
    f.name: getattr(target, f.name)
    for f in dataclasses.fields(DrafterConfig)
    if hasattr(target, f.name)
  }
  return DrafterConfig(
    **shared, kind="eagle", draft_vocab_size=target.vocab_size
  )


def rule(path: str) -> P:
  """The one spec of a parameter."""
  found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
  if len(found) != 1:
    raise ValueError(f"{path} matches {len(found)} sharding rules, not one")
  return found[0]


def place(params, dtype: str, mesh: Mesh) -> dict:
  """Shapes of parameters as they would lie on the mesh."""
  return tensors.nest(
    {
      path: jax.ShapeDtypeStruct(
        leaf.shape, dtype, sharding=NamedSharding(mesh, rule(path))
      )
      for path, leaf in tensors.flatten(params).items()
    }
  )


def models(shape: Shape, what: str, mesh: Mesh) -> states.Models:
  """`loading.models` with shapes for weights. what: "eagle" or "plain"."""
  t = shape.target
  V = t.vocab_size
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  here = NamedSharding(mesh, P())
  target = Target(t)
  itself = masks.Attend(own=masks.Itself())
  init = lambda key, ids: target.init(key, ids, ids, itself, None)["params"]
  target_params = place(jax.eval_shape(init, key, ids), t.dtype, mesh)
  drafter, drafter_params, vocabulary = None, None, None
  if what == "eagle":
    drafter = Drafter(drafter_config(t))
    feature = jax.ShapeDtypeStruct((1, 1, t.hidden_size), t.dtype)
    init = lambda key, ids, feature: drafter.init(
      key, ids, feature, ids, method="everything"
    )["params"]
    made = jax.eval_shape(init, key, ids, feature)
    drafter_params = place(made, t.dtype, mesh)
    vocabulary = jax.ShapeDtypeStruct((V,), jnp.int32, sharding=here)
  return states.Models(
    target=target,
    drafter=drafter,
    spec=shape.spec if drafter else tree.plain(),
    lazy_head=False,  # what `loading.models` chooses on an accelerator
    target_params=target_params,
    drafter_params=drafter_params,
    vocabulary=vocabulary,
    ends=jax.ShapeDtypeStruct((V,), bool, sharding=here),
  )


def compile_chunk(shape: Shape, what: str, mesh: Mesh):
  """The engine's "chunk" program.

  Returns:
    the compiled program and its DecodeState of shapes.
  """
  m = models(shape, what, mesh)
  # Room behind the context, as the engine leaves it.
  width = shape.capacity + engine.PREFILL_BUCKETS[-1] + 2
  state = jax.eval_shape(
    functools.partial(states.init_state, m, shape.batch, width, shape.capacity)
  )
  on = lambda spec: (
    lambda a: jax.ShapeDtypeStruct(
      a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
    )
  )
  state = jax.tree.map(on(P()), state).replace(
    cache=jax.tree.map(on(CACHE_SPEC), state.cache),
    draft_cache=jax.tree.map(on(CACHE_SPEC), state.draft_cache),
  )
  run = jax.jit(
    functools.partial(decoding.run_chunk, size=engine.CHUNK),
    donate_argnums=1,
    # donation needs the state to leave as it came
    out_shardings=(
      jax.tree.map(lambda a: a.sharding, state),
      NamedSharding(mesh, P()),
    ),
  )
  return run.lower(m, state, on(P())(jnp.zeros((), jnp.int32))).compile(), state


def on_chip(a) -> tuple[int, ...]:
  """The part of an array's shape that one chip holds."""
  return a.sharding.shard_shape(a.shape)


def count_bytes(arrays) -> int:
  """Bytes on one chip, without the padding of TPU tiles."""
  return sum(
    math.prod(on_chip(a)) * a.dtype.itemsize for a in jax.tree.leaves(arrays)
  )


def whole_copies(hlo: str, caches) -> dict[str, int]:
  """How many copies of a whole cache array the program makes, by direction.

  "hbm" is main memory; "vmem" on-chip memory (S(1) in a layout): a copy into
  it may stand for the read of the one who uses it. "hbm to hbm" is waste.
  """
  sizes = {",".join(map(str, on_chip(a))) for a in jax.tree.leaves(caches)}
  array = r"\w+\[([\d,]*)\](\{[^}]*\})?"
  memory = lambda layout: "vmem" if "S(1)" in layout else "hbm"
  where = {
    name: memory(layout)
    for name, _, layout in re.findall(rf"(%[\w.-]+) = {array}", hlo)
  }
  copy = rf"= \(?{array}.*? copy(?:-start)?\((%[\w.-]+)\)"
  return dict(
    collections.Counter(
      f"{where[source]} to {memory(layout)}"
      for size, layout, source in re.findall(copy, hlo)
      if size in sizes
    )
  )


def report(shape: Shape, what: str, mesh: Mesh) -> tuple[dict, str]:
  """The figures of one program, and its optimised HLO."""
  began = time.perf_counter()
  program, state = compile_chunk(shape, what, mesh)
  seconds = time.perf_counter() - began
  memory, cost = program.memory_analysis(), program.cost_analysis()
  hlo = program.as_text()
  caches = (state.cache, state.draft_cache)
  found = {
    "what": what,
    "chips": mesh.size,
    "device": mesh.devices.flat[0].device_kind,
    "layers": shape.target.num_layers,
    "batch": shape.batch,
    "compile_seconds": round(seconds, 1),
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "temp_bytes": memory.temp_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "cache_bytes": count_bytes(caches),
    "state_bytes": count_bytes(state),
    "cache_copies": whole_copies(hlo, caches),
    "flops": cost["flops"],
    "bytes_accessed": cost["bytes accessed"],
    "host_transfers": sorted(set(HOST.findall(hlo))),
  }
  return found, hlo


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--shape", choices=sorted(shapes()), default="tiny")
  parser.add_argument(
    "--what", nargs="+", choices=("eagle", "plain"), default=("eagle", "plain")
  )
  parser.add_argument("--topology", default="v5e:2x2")
  parser.add_argument("--chips", type=int, help="default: the shape's")
  parser.add_argument("--layers", type=int, help="default: the shape's")
  parser.add_argument("--batch", type=int, help="default: the shape's")
  parser.add_argument("--hlo", help="folder for the optimised HLO")
  args = parser.parse_args()
  if not ENVIRONMENT.items() <= os.environ.items():
    os.execve(
      sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT
    )
  shape = shapes()[args.shape]
  if args.layers:
    target = dataclasses.replace(shape.target, num_layers=args.layers)
    shape = dataclasses.replace(shape, target=target)
  if args.batch:
    shape = dataclasses.replace(shape, batch=args.batch)
  described = topologies.get_topology_desc(args.topology, platform="tpu")
  chips = args.chips or shape.chips
  mesh = Mesh(np.array(described.devices[:chips]), ("chips",))
  for what in args.what:
    figures, hlo = report(shape, what, mesh)
    print(json.dumps({"shape": args.shape} | figures), flush=True)
    if args.hlo:
      with open(os.path.join(args.hlo, f"{args.shape}_{what}.txt"), "w") as f:
        f.write(hlo)


if __name__ == "__main__":
  main()
