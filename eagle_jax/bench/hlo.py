"""What an optimised XLA program moves and computes, read from its text.

XLA's own `cost_analysis` counts a loop's body once, takes the dearer branch
of every conditional and charges a gather for its whole table. Here loops are
multiplied by their trip counts, a conditional costs its shorter branch (our
programs skip what no row asks for: greedy decoding), and a slice, gather or
in-place update costs the rows it touches.

Counted are bytes through main memory, tile padding included. A TPU's layouts
name the memory: S(1) is on-chip, so a weight prefetched into it is charged
once, by the copy.

  %w.vmem = bf16[64,128]{..S(1)} copy-start(%w)          reads 16 KiB
  %y      = bf16[8,128]{..S(1)} fusion(%x, %w.vmem)      reads none
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable

BYTES = {
  "pred": 1,
  **{f"{kind}{bits}": bits / 8 for kind in "su" for bits in (4, 8, 16, 32, 64)},
  **{"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "token": 0},
}
COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
# Move nothing: names, views, halves of a pair that is charged at its start.
FREE = {
  "parameter",
  "constant",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "after-all",
  "partition-id",
  "replica-id",
  "opt-barrier",
}
# Allocations and notes to the compiler.
FREE_CALLS = {
  "AllocateBuffer",
  "AssumeGatherIndicesInBound",
  "GatherScatterIndicesBitpacked",
  "Sharding",
}

_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
  r"(?:calls|body|condition|to_apply|true_computation|false_computation)"
  r"=(%[\w.-]+)|branch_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a shape: its element type, sizes and layout text."""

  dtype: str
  sizes: tuple[int, ...]
  layout: str

  @property
  def elements(self) -> int:
    return math.prod(self.sizes)

  @property
  def in_main_memory(self) -> bool:
    return not re.search(r"S\(\d+\)", self.layout)

  @property
  def bytes(self) -> float:
    """With the padding of the outermost tile: {1,0:T(8,128)} pads the two
    minor dimensions to multiples of 8 and 128."""
    order, _, rest = self.layout.partition(":")
    sizes = list(self.sizes)
    tile = re.match(r"T\(([\d,]+)\)", rest)
    if tile and order and sizes:
      minor = [int(i) for i in order.split(",")]
      for size, dimension in zip(
        reversed(tile.group(1).split(",")), minor, strict=False
      ):
        sizes[dimension] = -(-sizes[dimension] // int(size)) * int(size)
    return math.prod(sizes) * BYTES[self.dtype]


def arrays(shape: str) -> list[Array]:
  """All arrays of a shape, tuples flattened."""
  return [
    Array(
      dtype,
      tuple(int(n) for n in sizes.split(",") if n),
      layout or "",
    )
    for dtype, sizes, layout in _ARRAY.findall(shape)
    if dtype in BYTES
  ]


@dataclasses.dataclass
class Instruction:
  name: str
  shape: str
  opcode: str
  operands: list[str]
  attributes: str
  root: bool

  @property
  def called(self) -> list[str]:
    found = []
    for one, many in _CALLED.findall(self.attributes):
      found += [one] if one else re.findall(r"%[\w.-]+", many)
    return found

  @property
  def op_name(self) -> str:
    """Where in the source it comes from: jit(f)/grow/draft_1/..."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found.group(1) if found else ""

  @property
  def cycles(self) -> int:
    """The compiler's estimate of core cycles; 0 where it gives none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found.group(1)) if found else 0


Computation = dict[str, Instruction]


def _closing(text: str, start: int) -> int:
  """Index just past the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if not depth:
      return i + 1
  raise ValueError(f"unbalanced: {text[start : start + 80]}")


@dataclasses.dataclass
class Module:
  """Computations by name; `entry` is where the program starts."""

  computations: dict[str, Computation]
  entry: str


def parse(text: str) -> Module:
  """The text of an optimised module (XLA's HLO format)."""
  computations: dict[str, Computation] = {}
  current: Computation = {}
  entry = ""
  for line in text.splitlines():
    if not line.startswith(" "):
      start = re.match(r"(ENTRY )?(%[\w.-]+) .*\{$", line)
      if start:
        current = computations.setdefault(start.group(2), {})
        entry = start.group(2) if start.group(1) else entry
      continue
    found = re.match(r"\s+(ROOT )?(%[\w.-]+) = ", line)
    if not found:
      continue
    at = found.end()
    end = _closing(line, at) if line[at] == "(" else line.index(" ", at)
    opening = line.index("(", end)
    closing = _closing(line, opening)
    current[found.group(2)] = Instruction(
      found.group(2),
      line[at:end],
      line[end:opening].strip(),
      re.findall(r"%[\w.-]+", line[opening:closing])
      or [line[opening + 1 : closing - 1]],
      line[closing:],
      bool(found.group(1)),
    )
  return Module(computations, entry)


AMOUNTS = ("flops", "bytes", "cycles", "small_cycles", "operations")
SMALL = 1e6  # bytes


@dataclasses.dataclass
class Cost:
  """Per chip. collectives: kind -> (how many, bytes that one chip hands in).

  bytes: read and written in main memory. cycles: the compiler's estimate;
  small_cycles: those of small operations alone, which neither multiply
  matrices nor move a megabyte. operations: launched fusions, copies, ...
  """

  flops: float = 0.0
  bytes: float = 0.0
  cycles: float = 0.0
  small_cycles: float = 0.0
  operations: float = 0.0
  collectives: dict[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )

  def add(self, other: "Cost", times: float = 1.0) -> None:
    for name in AMOUNTS:
      value = getattr(self, name) + times * getattr(other, name)
      setattr(self, name, value)
    for kind, (count, moved) in other.collectives.items():
      before = self.collectives.get(kind, (0.0, 0.0))
      self.collectives[kind] = (
        before[0] + times * count,
        before[1] + times * moved,
      )


# (its op_name) -> trips, or None: take the loop's own bound.
Trips = Callable[[str], float | None]
# (an op_name) -> the stage that it is charged to.
Stage = Callable[[str], str]


class Reader:
  """Charges the instructions of a module."""

  def __init__(self, module: Module, trips: Trips, stage: Stage):
    self.module = module
    self.trips = trips
    self.stage = stage
    self._known_readers: dict[int, dict[str, Instruction]] = {}

  def cost(self, computation: str) -> dict[str, Cost]:
    """Stage -> cost of running a computation once."""
    total: dict[str, Cost] = collections.defaultdict(Cost)
    inside = self.module.computations[computation]
    for i in inside.values():
      if i.opcode == "while":
        times = self._trip_count(i, inside)
        for name in i.called if times else ():
          for stage, cost in self.cost(name).items():
            total[stage].add(cost, times)
      elif i.opcode == "conditional":
        branch = min(i.called, key=self._length)
        for stage, cost in self.cost(branch).items():
          total[stage].add(cost)
      elif i.opcode == "call":
        for stage, cost in self.cost(i.called[0]).items():
          total[stage].add(cost)
      else:
        one = self._one(i, inside)
        if one.operations:
          total[self.stage(self._source(i, inside))].add(one)
    return dict(total)

  def _source(self, i: Instruction, inside: Computation) -> str:
    """Its place in the source; a prefetch is charged to who reads it."""
    while not i.op_name:
      reader = self._readers(inside).get(i.name)
      if reader is None:
        return ""
      i = reader
    return i.op_name

  def _readers(self, inside: Computation) -> dict[str, Instruction]:
    """The first reader of each instruction's result."""
    key = id(inside)
    if key not in self._known_readers:
      found: dict[str, Instruction] = {}
      for i in inside.values():
        for o in i.operands:
          found.setdefault(o, i)
      self._known_readers[key] = found
    return self._known_readers[key]

  def loop_body(self, op_name: str) -> str:
    """The body of the one loop that comes from this place in the source."""
    found = {
      re.search(r"body=(%[\w.-]+)", i.attributes).group(1)
      for inside in self.module.computations.values()
      for i in inside.values()
      if i.opcode == "while" and i.op_name == op_name
    }
    if len(found) != 1:
      raise ValueError(f"{len(found)} loops come from {op_name!r}, not one")
    return found.pop()

  def _length(self, computation: str) -> int:
    """Instructions, those of called computations included."""
    inside = self.module.computations[computation].values()
    return len(inside) + sum(self._length(c) for i in inside for c in i.called)

  def _trip_count(self, loop: Instruction, inside: Computation) -> float:
    """Given, or the constant that a counted loop's condition compares to."""
    given = self.trips(loop.op_name)
    if given is not None:
      return given
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
      return int(known.group(1))
    name = re.search(r"condition=(%[\w.-]+)", loop.attributes).group(1)
    condition = self.module.computations[name]
    initial = inside[loop.operands[0]]
    for i in condition.values():
      compared = i
      reached = dict(enumerate(i.operands))
      if i.opcode == "fusion":  # the comparison may be wrapped
        body = self.module.computations[i.called[0]]
        compared = next((x for x in body.values() if x.root), i)
        numbers = {
          x.name: int(x.operands[0])
          for x in body.values()
          if x.opcode == "parameter"
        }
        reached = {
          n: i.operands[numbers[o]]
          for n, o in enumerate(compared.operands)
          if o in numbers
        }
      if compared.opcode != "compare" or "=LT" not in compared.attributes:
        continue
      bound = condition.get(reached.get(1, ""))
      if bound is not None and bound.opcode == "get-tuple-element":
        index = int(re.search(r"index=(\d+)", bound.attributes).group(1))
        bound = inside.get(initial.operands[index])
        while bound is not None and bound.opcode.startswith("copy"):
          bound = inside.get(bound.operands[0])
      if bound is not None and bound.opcode == "constant":
        return int(bound.operands[0])
    raise ValueError(f"the trips of {loop.name} ({loop.op_name}) are unknown")

  # One instruction -------------------------------------------------------

  def _one(self, i: Instruction, inside: Computation) -> Cost:
    kind = re.sub(r"-start$", "", i.opcode)
    free_call = i.opcode == "custom-call" and any(
      f'custom_call_target="{name}"' in i.attributes for name in FREE_CALLS
    )
    if i.opcode in FREE or free_call or re.search(r"-(done|update)$", i.opcode):
      return Cost()
    operands = [inside[o] for o in i.operands if o in inside]
    if i.opcode == "async-start":  # a copy, slice or collective of its own
      body = self.module.computations[i.called[0]]
      cost = Cost()
      for one in self.cost(i.called[0]).values():
        cost.add(one)
      if any(x.opcode == "fusion" for x in body.values()):
        return cost
      cost.operations = 1
      return cost
    cost = Cost(operations=1, cycles=i.cycles)
    cost.flops = self._flops(i, inside)
    if kind in COLLECTIVES:
      moved = sum(a.bytes for o in operands for a in arrays(o.shape))
      cost.collectives = {kind: (1, moved)}
    cost.bytes = self._bytes(i, operands)
    if not cost.flops and cost.bytes < SMALL:
      cost.small_cycles = cost.cycles
    return cost

  def _bytes(self, i: Instruction, operands: list[Instruction]) -> float:
    """Main memory bytes that one instruction reads and writes."""
    if i.opcode in ("copy-start", "slice-start", "copy", "slice"):
      out = arrays(i.shape)[:1]  # the rest names the source and a flag
      if i.opcode == "copy-start":
        source = arrays(i.shape)[1:2]
      else:
        source = [
          dataclasses.replace(out[0], layout=a.layout)
          for a in arrays(operands[0].shape)[:1]
        ]
      return sum(a.bytes for a in (*out, *source) if a.in_main_memory)
    written = arrays(i.shape)
    if i.opcode.endswith("-start"):  # (operands, results, flags)
      written = written[len(operands) : 2 * len(operands)]
    if i.opcode == "dynamic-update-slice":
      touched = arrays(operands[1].shape)
      target = arrays(i.shape)[0]
      return sum(
        a.bytes * (target.in_main_memory + a.in_main_memory) for a in touched
      )
    if i.opcode in ("dynamic-slice", "gather"):
      source = arrays(operands[0].shape)[0]
      return sum(
        a.bytes * (a.in_main_memory + source.in_main_memory) for a in written
      )
    if i.opcode == "fusion":
      body = self.module.computations[i.called[0]]
      total = self._written(body, i)
      for number, operand in enumerate(operands):
        whole = [a for a in arrays(operand.shape) if a.in_main_memory]
        if whole:
          total += min(self._used(body, number, whole[0].dtype), whole[0].bytes)
      return total
    reads = [a for o in operands for a in arrays(o.shape)]
    return sum(a.bytes for a in (*reads, *written) if a.in_main_memory)

  def _used(self, body: Computation, number: int, dtype: str) -> float:
    """Bytes of parameter `number` that a fused computation reads."""
    names = {
      x.name
      for x in body.values()
      if x.opcode == "parameter" and x.operands[0] == str(number)
    }
    total = 0.0
    while names:
      if any(body[n].root for n in names):
        return math.inf
      following = set()
      for x in body.values():
        mine = [n for n, o in enumerate(x.operands) if o in names]
        if not mine:
          continue
        if x.opcode in ("bitcast", "reshape"):
          following.add(x.name)
        elif x.opcode in ("dynamic-slice", "slice", "gather") and mine == [0]:
          total += arrays(x.shape)[0].elements * BYTES[dtype]
        elif x.opcode == "dynamic-update-slice" and mine == [0]:
          pass  # in place: the rest of the buffer is not touched
        elif x.opcode == "fusion":
          inner = self.module.computations[x.called[0]]
          if any(_passes(inner, n) for n in mine):
            following.add(x.name)
          else:
            total += sum(self._used(inner, n, dtype) for n in mine)
        elif x.opcode == "custom-call" and any(
          f'"{name}"' in x.attributes for name in FREE_CALLS
        ):
          following.add(x.name)
        else:
          return math.inf
      names = following
    return total

  def _written(self, body: Computation, fusion: Instruction) -> float:
    """Bytes that a fusion writes: of an in-place update, the new rows."""
    root = next(x for x in body.values() if x.root)
    roots = [root]
    if root.opcode == "tuple":
      roots = [body[o] for o in root.operands]
    total = 0.0
    for x, out in zip(roots, arrays(fusion.shape), strict=False):
      while x.opcode in ("bitcast", "reshape", "copy"):
        x = body[x.operands[0]]
      if x.opcode == "fusion":
        inner = self.module.computations[x.called[0]]
        total += self._written(inner, dataclasses.replace(x, shape=_text(out)))
        continue
      if not out.in_main_memory:
        continue
      if x.opcode == "dynamic-update-slice":
        out = arrays(body[x.operands[1]].shape)[0]
        out = dataclasses.replace(out, layout="")
      total += out.bytes
    return total

  def _flops(self, i: Instruction, inside: Computation) -> float:
    """Of matrix products, which TPUs write as convolutions."""
    if i.opcode == "fusion":
      body = self.module.computations[i.called[0]]
      return sum(self._flops(x, body) for x in body.values())
    if i.opcode == "dot":
      left = arrays(inside[i.operands[0]].shape)[0]
      contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
      depth = math.prod(
        left.sizes[int(d)] for d in contracted.group(1).split(",") if d
      )
      return 2.0 * arrays(i.shape)[0].elements * depth
    if i.opcode == "convolution":
      left, kernel = (arrays(inside[o].shape)[0] for o in i.operands[:2])
      out = arrays(i.shape)[0]
      return _convolution_flops(left, kernel, out, i.attributes)
    return 0.0


def _passes(body: Computation, number: int) -> bool:
  """Does a fused computation hand parameter `number` on as it is?"""
  x = next(x for x in body.values() if x.root)
  while x.opcode in ("bitcast", "reshape"):
    x = body[x.operands[0]]
  return x.opcode == "parameter" and x.operands[0] == str(number)


def _text(a: Array) -> str:
  return f"{a.dtype}[{','.join(map(str, a.sizes))}]{{{a.layout}}}"


def _convolution_flops(
  left: Array, kernel: Array, out: Array, attributes: str
) -> float:
  """Multiplications and additions that meet an element, not padding.

  A TPU writes a batch of products as a window over a spatial dimension that
  is dilated or padded until each output meets one element of it.
  """
  lhs, rhs, result = re.search(
    r"dim_labels=(\w+)_(\w+)->(\w+)", attributes
  ).groups()
  window = re.search(r"window=\{([^}]*)\}", attributes)
  fields = dict(
    re.findall(r"(\w+)=([\w-]+)", window.group(1) if window else "")
  )
  numbers = lambda name, n, missing: (
    [int(x) for x in fields[name].split("x")]
    if name in fields
    else [missing] * n
  )
  spatial = sorted(c for c in result if c.isdigit())
  n = len(spatial)
  sizes, strides = numbers("size", n, 1), numbers("stride", n, 1)
  left_steps = numbers("lhs_dilate", n, 1)
  right_steps = numbers("rhs_dilate", n, 1)
  pads = [
    int(x.split("_")[0])
    for x in fields.get("pad", "x".join(["0_0"] * n)).split("x")
    if x
  ]
  total = 2.0 * kernel.sizes[rhs.index("i")]
  total *= out.sizes[result.index("b")] * out.sizes[result.index("f")]
  for d, name in enumerate(spatial):
    inputs, outputs = left.sizes[lhs.index(name)], out.sizes[result.index(name)]
    span = (inputs - 1) * left_steps[d] + 1
    meets = 0
    for o in range(outputs):
      for w in range(sizes[d]):
        at = o * strides[d] + w * right_steps[d] - pads[d]
        meets += 0 <= at < span and at % left_steps[d] == 0
    total *= meets
  return total


def host_transfers(text: str) -> list[str]:
  """What would stop the device for the host; memory space 5 is the host's."""
  return sorted(
    set(
      re.findall(
        r"\b(?:infeed|outfeed|send|recv)(?:-done)?\("
        r"|is_host_transfer=true|MoveToHost|S\(5\)"
        r"|custom_call_target=\"[^\"]*callback",
        text,
      )
    )
  )


def whole_copies(
  module: Module, computation: str, sizes: set[tuple[int, ...]]
) -> dict[str, int]:
  """Copies of arrays of these sizes in a computation and what it calls.

  By direction: "main to on-chip" may stand for the read of the one who uses
  it; "main to main" is waste.
  """
  found: dict[str, int] = collections.Counter()
  where = lambda a: "main" if a.in_main_memory else "on-chip"
  inside = module.computations[computation]
  for i in inside.values():
    for called in i.called:
      found.update(whole_copies(module, called, sizes))
    if i.opcode not in ("copy", "copy-start") or i.operands[0] not in inside:
      continue
    out = arrays(i.shape)[0]
    if out.sizes in sizes:
      source = arrays(inside[i.operands[0]].shape)[0]
      found[f"{where(source)} to {where(out)}"] += 1
  return dict(found)
