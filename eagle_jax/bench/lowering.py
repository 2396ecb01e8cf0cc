"""Compiles the decode cycle and the train step from shapes alone.

`libtpu` holds the TPU compiler, which compiles for a topology that is only
described: no TPU is there, no weight is in memory. The program analysed is the
one that runs, a chunk of cycles; one cycle is the body of its loop.
"""

import dataclasses
import functools
import math
import pathlib
import tempfile

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from eagle_jax import loading, sharding
from eagle_jax.bench import hlo, roofline
from eagle_jax.bench.roofline import CHIPS, Chip
from eagle_jax.checkpoints import drafters, hf_target, tensors
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.speculation import decoding, engine, tree
from eagle_jax.speculation import state as states
from eagle_jax.speculation.state import Models
from eagle_jax.speculation.tree import TreeSpec
from eagle_jax.training import step as train_step
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.losses import Batch

SMALL = (2, 4)  # layers compiled; the rest is extrapolated
NO_LAYERS = ("grow", "accept", "extend")  # stages without the target's layers
CYCLE = "jit(run_chunk)/while"  # the loop over cycles, by its place in source
WALK = "jit(run_chunk)/while/body/accept/while"


@dataclasses.dataclass(frozen=True)
class Draft:
  """A drafter, its tree, and the tau that was published for just these two.

  tau: tokens a verify pass; None where none is published. source: of tau.
  """

  config: DrafterConfig
  spec: TreeSpec
  tau: float | None
  source: str


@dataclasses.dataclass(frozen=True)
class Shapes:
  """What to compile. batch: B. capacity: S, cache slots, all of them read.

  drafts: by name. train: the recipe of a train step, or None. Weights are in
  target.dtype.
  """

  name: str
  target: TargetConfig
  drafts: dict[str, Draft]
  batch: int
  capacity: int
  train: TrainConfig | None


def with_layers(
  s: Shapes, draft: Draft | None, layers: int
) -> tuple[Shapes, Draft | None]:
  """The same shapes with fewer layers; taps move to layers that are there."""
  s = dataclasses.replace(
    s, target=dataclasses.replace(s.target, num_layers=layers)
  )
  if draft is not None and draft.config.taps:
    taps = tuple(range(len(draft.config.taps)))
    config = dataclasses.replace(draft.config, taps=taps)
    draft = dataclasses.replace(draft, config=config)
  return s, draft


def chip_of(topology: str) -> Chip:
  kind = topology.partition(":")[0]
  if kind not in CHIPS:
    raise InputError(
      f"topology {topology!r}: chip {kind!r} is unknown, use one of"
      f" {', '.join(CHIPS)}, for example v6e:1x1"
    )
  return CHIPS[kind]


def described(topology: str):
  """JAX devices of a slice that is not there.

  Raises:
    InputError: libtpu does not know the topology.
  """
  chip_of(topology)
  try:
    return topologies.get_topology_desc(topology, platform="tpu").devices
  except (jax.errors.JaxRuntimeError, ValueError) as e:
    raise InputError(
      f"topology {topology!r} is not one that libtpu describes"
      f" ({str(e).splitlines()[0][:100]})"
    ) from e


def target_params(target: TargetConfig) -> dict:
  """Shapes of a target's weights, in the target's dtype."""
  return _weights(hf_target.parameter_shapes(target), target.dtype)


def drafter_params(config: DrafterConfig, dtype: str) -> dict:
  """Shapes of a drafter's weights, the target's tables included."""
  return _weights(drafters.parameter_shapes(config), dtype)


def _weights(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict:
  make = lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
  return tensors.nest({path: make(shape) for path, shape in shapes.items()})


def models(s: Shapes, draft: Draft | None, mesh: Mesh) -> Models:
  """`loading.models` with shapes for weights, placed for decoding."""
  t, d = s.target, draft.config if draft else None
  vector = jax.ShapeDtypeStruct
  spec = draft.spec if draft else tree.plain()
  platform = mesh.devices.flat[0].platform
  m = Models(
    target=Target(t, d.taps if d else ()),
    drafter=Drafter(d) if d else None,
    spec=spec,
    lazy_head=loading.lazy_head(spec.num_nodes, platform, in_blocks=False),
    mesh=mesh,
    target_params=target_params(t),
    drafter_params=drafter_params(d, t.dtype) if d else None,
    vocabulary=vector((d.draft_vocab_size,), jnp.int32) if d else None,
    ends=vector((t.vocab_size,), bool),
  )
  return sharding.shapes(m, sharding.decode_models(m, mesh))


def decode_arguments(s: Shapes, draft: Draft | None, mesh: Mesh):
  """(models, state) of shapes, as a chunk of cycles takes them."""
  m = models(s, draft, mesh)
  # Room behind the context, as the engine leaves it.
  width = s.capacity + engine.PREFILL_BUCKETS[-1] + 2
  state = jax.eval_shape(
    functools.partial(states.init_state, m, s.batch, width, s.capacity)
  )
  return m, sharding.shapes(state, sharding.decode_state(state, m, mesh))


def lower_chunk(s: Shapes, draft: Draft | None, mesh: Mesh):
  """The engine's "chunk" program, lowered."""
  m, state = decode_arguments(s, draft, mesh)
  whole = sharding.replicated(mesh)
  run = jax.jit(
    functools.partial(decoding.run_chunk, size=engine.CHUNK),
    donate_argnums=1,
    # donation needs the state to leave as it came
    out_shardings=(jax.tree.map(lambda a: a.sharding, state), whole),
  )
  most = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
  return run.lower(m, state, most)


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program's text and its memory, bytes on one chip."""

  text: str
  arguments: int
  temporaries: int
  outputs: int
  aliased: int

  @property
  def resident(self) -> int:
    return self.arguments + self.temporaries + self.outputs - self.aliased


def compile_program(lowered, options: dict) -> Program:
  """Compiles, and reads what the compiler made of it.

  The text is the compiler's own dump where it writes one: it has the cycle
  estimates that `as_text` lacks.
  """
  with tempfile.TemporaryDirectory() as folder:
    compiled = lowered.compile(
      options
      | {
        "xla_dump_to": folder,
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_module_re": ".*",
      }
    )
    dumps = sorted(pathlib.Path(folder).glob("*after_codegen.txt"))
    text = dumps[-1].read_text() if dumps else compiled.as_text()
  memory = compiled.memory_analysis()
  return Program(
    text,
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    memory.output_size_in_bytes,
    memory.alias_size_in_bytes,
  )


# Analysis ----------------------------------------------------------------


def stage_of(op_name: str) -> str:
  """grow, verify, accept, commit, extend, or other."""
  inner = op_name.removeprefix(CYCLE + "/body/")
  first = inner.split("/")[0]
  known = ("grow", "verify", "accept", "commit", "extend")
  return first if inner != op_name and first in known else "other"


def cycle_costs(text: str, steps: float) -> dict[str, hlo.Cost]:
  """Stage -> cost of one greedy cycle.

  "chunk" is a cycle's share of what a chunk does once, around its loop.

  Args:
    text: of a compiled chunk.
    steps: tokens that the walk decides in a cycle, its trip count.
  """
  module = hlo.parse(text)
  trips = lambda op: steps if op == WALK else None
  reader = hlo.Reader(module, trips, stage_of)
  costs = reader.cost(reader.loop_body(CYCLE))
  once = hlo.Reader(module, lambda op: 0 if op == CYCLE else None, str)
  costs["chunk"] = hlo.Cost()
  for cost in once.cost(module.entry).values():
    costs["chunk"].add(cost, 1 / engine.CHUNK)
  return costs


def linear(small, large, layers: int, between=SMALL):
  """f(layers) of the line through f(between[0]) and f(between[1])."""
  slope = (large - small) / (between[1] - between[0])
  return small + slope * (layers - between[0])


def extrapolate(
  small: dict[str, hlo.Cost], large: dict[str, hlo.Cost], layers: int
) -> dict[str, hlo.Cost]:
  """Stage costs of a deeper target, linear in its layers.

  What the drafter and the walk do has none of them: there the two programs
  differ only by what the compiler happens to keep on chip, and the deeper one
  counts.
  """
  found = {}
  none = hlo.Cost()
  for stage in sorted(set(small) | set(large)):
    a, b = small.get(stage, none), large.get(stage, none)
    if stage in NO_LAYERS:
      found[stage] = b
      continue
    line = lambda name, a=a, b=b: linear(
      getattr(a, name), getattr(b, name), layers
    )
    kinds = set(a.collectives) | set(b.collectives)
    pair = lambda c, kind: c.collectives.get(kind, (0.0, 0.0))
    found[stage] = hlo.Cost(
      *(line(n) for n in hlo.AMOUNTS),
      {
        kind: tuple(
          linear(x, y, layers)
          for x, y in zip(pair(a, kind), pair(b, kind), strict=True)
        )
        for kind in sorted(kinds)
      },
    )
  return found


def on_chip_bytes(tree) -> int:
  """Bytes of a tree of placed shapes on one chip, without tile padding."""
  return sum(
    math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    for a in jax.tree.leaves(tree)
  )


@dataclasses.dataclass(frozen=True)
class Bound:
  """The least that a cycle must read on one chip, in bytes.

  verify: the target's weights but its embedding table (rows are looked up),
  and its cache, once. draft: the drafter's, once a level: L - 1 runs that
  grow the tree and one that re-reads the accepted tokens.
  """

  verify: int
  draft: int


def bound(s: Shapes, draft: Draft | None, mesh: Mesh) -> Bound:
  m, state = decode_arguments(s, draft, mesh)
  read = {
    k: v
    for k, v in m.target_params.items()
    if k != "embed_tokens" or s.target.tied_head
  }
  verify = on_chip_bytes((read, state.cache))
  if draft is None:
    return Bound(verify, 0)
  # the fusion matrix reads true features: once a cycle, not once a level
  once = ("fc",) if draft.config.kind == "eagle3" else ()
  level = {
    k: v
    for k, v in m.drafter_params.items()
    if k != "embed_tokens" and k not in once
  }
  fusion = {k: m.drafter_params[k] for k in once}
  levels = max(draft.spec.levels - 1, 0) + 1
  return Bound(
    verify,
    levels * on_chip_bytes((level, state.draft_cache)) + on_chip_bytes(fusion),
  )


def _cache_copies(text: str, caches) -> dict[str, int]:
  """Copies of a whole cache array in one cycle."""
  module = hlo.parse(text)
  body = hlo.Reader(module, lambda op: None, stage_of).loop_body(CYCLE)
  sizes = {a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(caches)}
  return hlo.whole_copies(module, body, sizes)


def analyse(
  s: Shapes, draft: Draft | None, mesh: Mesh, chip: Chip, full: bool
) -> dict:
  """The figures of a decode program on a mesh. draft None: plain decoding.

  Args:
    full: compile all layers; else `SMALL` numbers of them, extrapolated.
  """
  steps = (draft.tau or draft.spec.levels + 1) if draft else 1.0
  n = s.target.num_layers
  depths = (n,) if full else SMALL
  options = engine.compiler_options(mesh.devices.flat[0].platform)
  programs, costs, in_place = [], [], []
  for depth in depths:
    fewer, shallow = with_layers(s, draft, depth) if depth != n else (s, draft)
    program = compile_program(lower_chunk(fewer, shallow, mesh), options)
    state = decode_arguments(fewer, shallow, mesh)[1]
    caches = (state.cache, state.draft_cache)
    programs.append(program)
    costs.append(cycle_costs(program.text, steps))
    in_place.append(program.aliased >= on_chip_bytes(caches))
  line = lambda values: values[0] if full else linear(*values, layers=n)
  stages = costs[0] if full else extrapolate(*costs, layers=n)
  m, state = decode_arguments(s, draft, mesh)
  times = {
    k: roofline.time_of(c, chip, mesh.shape["tensor"])
    for k, c in stages.items()
  }
  least = bound(s, draft, mesh)
  caches = (state.cache, state.draft_cache)
  resident = line([p.resident for p in programs])
  return {
    "what": "decode" if draft else "plain",
    "layers_compiled": list(depths),
    "bytes_per_chip": {
      "all": round(resident),
      "weights": on_chip_bytes((m.target_params, m.drafter_params)),
      "caches": on_chip_bytes(caches),
      "temporaries": round(line([p.temporaries for p in programs])),
    },
    "fits": bool(resident <= chip.memory),
    "caches_in_place": all(in_place),
    "cache_copies": _cache_copies(programs[-1].text, caches),
    "host_transfers": hlo.host_transfers(programs[-1].text),
    "stages": {
      k: dataclasses.asdict(stages[k])
      | {"seconds": dataclasses.asdict(times[k]) | {"total": times[k].total}}
      for k in stages
    },
    "flops": sum(c.flops for c in stages.values()),
    "hbm_bytes": sum(c.bytes for c in stages.values()),
    "seconds": roofline.total(times),
    "compiler_seconds": sum(c.cycles for c in stages.values()) / chip.clock,
    "bound_bytes": dataclasses.asdict(least),
    "bound_seconds": (least.verify + least.draft) / chip.bandwidth,
  }


def lower_train(s: Shapes, kind: str, mesh: Mesh):
  """The train step of a drafter, lowered over a mesh.

  Args:
    kind: of s.drafts, the drafter to train.
  """
  c, config = s.train, s.drafts[kind].config
  n = train_step.Networks(Target(s.target, config.taps), Drafter(config))
  params = drafter_params(config, "float32")
  trained, frozen_part = train_step.split(params, c.train_head)
  optimizer = train_step.make_optimizer(c, c.warmup_steps + 1)
  state = jax.eval_shape(
    lambda p: train_step.initial_state(c, optimizer, p), trained
  )
  vector = jax.ShapeDtypeStruct
  D, W = config.hidden_size, config.draft_vocab_size
  frozen = train_step.Frozen(
    target=target_params(s.target),
    drafter=jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, s.target.dtype), frozen_part
    ),
    head=vector((D, W), s.target.dtype),
    vocabulary=vector((W,), jnp.int32),
  )
  rows = lambda dtype: vector((c.batch_size, c.row_length), dtype)
  batch = Batch(
    tokens=rows(jnp.int32),
    mask=rows(bool),
    documents=rows(jnp.int32),
    positions=rows(jnp.int32),
    features=None,
    final=None,
  )
  quiet = lambda line: None
  places = (
    train_step.state_shardings(state, optimizer, n, mesh, quiet),
    train_step.frozen_shardings(frozen, n, mesh, quiet),
  )
  step = train_step.make_train_step(c, n, optimizer, mesh)
  return train_step.jit_train_step(step, *places, mesh).lower(
    state, frozen, batch
  )


def analyse_train(
  s: Shapes, kind: str, mesh: Mesh, chip: Chip, full: bool
) -> dict:
  """The figures of a train step. Loops keep their own trip counts."""
  n = s.target.num_layers
  depths = (n,) if full else SMALL
  programs, costs = [], []
  for depth in depths:
    fewer, draft = s, s.drafts[kind]
    if depth != n:
      fewer, draft = with_layers(s, draft, depth)
    fewer = dataclasses.replace(fewer, drafts={kind: draft})
    program = compile_program(lower_train(fewer, kind, mesh), {})
    module = hlo.parse(program.text)
    reader = hlo.Reader(module, lambda op: None, lambda op: "step")
    programs.append(program)
    costs.append(reader.cost(module.entry))
  line = lambda values: values[0] if full else linear(*values, layers=n)
  cost = (costs[0] if full else extrapolate(*costs, layers=n))["step"]
  # Collectives run along the longer of the two axes at the worst.
  ways = max(mesh.shape["fsdp"], mesh.shape["tensor"])
  time = roofline.time_of(cost, chip, ways)
  resident = line([p.resident for p in programs])
  tokens = s.train.batch_size * s.train.row_length
  return {
    "what": "train",
    "layers_compiled": list(depths),
    "mesh": dict(mesh.shape),
    "tokens_a_step": tokens,
    "bytes_per_chip": {
      "all": round(resident),
      "arguments": round(line([p.arguments for p in programs])),
      "temporaries": round(line([p.temporaries for p in programs])),
    },
    "fits": bool(resident <= chip.memory),
    "host_transfers": hlo.host_transfers(programs[-1].text),
    "step": dataclasses.asdict(cost),
    "seconds": dataclasses.asdict(time) | {"total": time.total},
    "tokens_per_s": tokens / time.total,
  }
