"""Analyses of many programs: kept, told and tabulated."""

import hashlib
import importlib.metadata
import json
import pathlib

from jax.sharding import Mesh

from eagle_jax import sharding
from eagle_jax.bench import lowering, roofline
from eagle_jax.bench.lowering import Shapes
from eagle_jax.errors import InputError
from eagle_jax.files import write_whole

WHAT = ("plain", "decode", "train")


def mesh_for(sizes: tuple[int, int, int] | None, what: str, devices) -> Mesh:
  """sizes None: all chips along tensor to decode, along fsdp to train."""
  default = (1, 0, 1) if what == "train" else (1, 1, 0)
  return sharding.make_mesh(sizes or default, devices)


def programs(s: Shapes, what: list[str], drafts: list[str]) -> list[str]:
  """Names of what is compiled: "plain", "decode eagle2", "train eagle3"."""
  for name in what:
    if name not in WHAT:
      raise InputError(f"what {name!r} must be one of {', '.join(WHAT)}")
  for name in drafts:
    if name not in s.drafts:
      raise InputError(
        f"{s.name} has no drafter {name!r}: use {', '.join(s.drafts)}"
      )
  if "train" in what and s.train is None:
    raise InputError(f"the config of {s.name} has no train recipe")
  named = drafts or list(s.drafts)
  found = []
  for name in what:
    found += [name] if name == "plain" else [f"{name} {d}" for d in named]
  return found


def analyse(
  s: Shapes,
  program: str,
  topology: str,
  sizes: tuple[int, int, int] | None,
  full: bool,
) -> dict:
  """Compile one program for a slice, and read it."""
  chip = lowering.chip_of(topology)
  what, _, name = program.partition(" ")
  mesh = mesh_for(sizes, what, lowering.described(topology))
  if what == "train":
    found = lowering.analyse_train(s, name, mesh, chip, full)
  else:
    draft = s.drafts[name] if name else None
    found = lowering.analyse(s, draft, mesh, chip, full)
  return found | {"config": s.name, "topology": topology, "program": program}


def key(
  s: Shapes,
  program: str,
  topology: str,
  sizes: tuple[int, ...] | None,
  full: bool,
) -> str:
  """What a kept analysis is of: all that makes the program, and its compiler.

  The last part stands for what is too long to name: the networks, the recipe
  of a train step, the versions. A cycle's key differs from its plain one's in
  the program alone, so drafters and trees are all in there.
  """
  parts = [s.name, topology, program, f"B={s.batch} S={s.capacity}"]
  if sizes:
    parts.append(f"mesh {','.join(map(str, sizes))}")
  if full:
    parts.append("all layers")
  train = s.train if program.startswith("train") else None
  versions = [importlib.metadata.version(p) for p in ("jax", "libtpu")]
  rest = repr((s.target, s.drafts, train, versions)).encode()
  return " | ".join([*parts, hashlib.sha256(rest).hexdigest()[:8]])


class Results:
  """Analyses by `key`, written to a folder after each one."""

  def __init__(self, folder: pathlib.Path | None):
    self.file = folder / "predicted.json" if folder else None
    self.found: dict[str, dict] = {}
    if self.file and self.file.exists():
      try:
        self.found = json.loads(self.file.read_text())
      except json.JSONDecodeError as e:
        raise InputError(
          f"{self.file} is not JSON (line {e.lineno}): mend or remove it"
        ) from None

  def put(self, name: str, value: dict, configs: list[Shapes]) -> None:
    self.found[name] = value
    if self.file is None:
      return
    self.file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(self.file, json.dumps(self.found, indent=1) + "\n")
    markdown = self.file.with_suffix(".md")
    markdown.write_text(table(self.found, configs) + "\n")


def told(found: dict) -> str:
  """One analysis as lines to read."""
  giga = lambda x: f"{x / 1e9:.2f} GB"
  milli = lambda x: f"{x * 1e3:.3f} ms"
  memory = ", ".join(
    f"{name} {giga(b)}"
    for name, b in found["bytes_per_chip"].items()
    if name != "all"
  )
  fits = "fits" if found["fits"] else "DOES NOT FIT"
  lines = [
    f"{found['config']}, {found['program']}, {found['topology']}: {fits},"
    f" {giga(found['bytes_per_chip']['all'])} a chip ({memory})",
  ]
  depths = " and ".join(map(str, found["layers_compiled"]))
  lines.append(f"  compiled with {depths} layers")
  if found["what"] == "train":
    cost, seconds = found["step"], found["seconds"]
    lines.append(
      f"  a step: {cost['flops'] / 1e12:.1f} TFLOP, {giga(cost['bytes'])} of"
      f" main memory, at best {milli(seconds['total'])}"
      f" ({found['tokens_per_s']:.0f} tokens/s)"
    )
    lines += _links(cost["collectives"])
    return "\n".join(lines)
  lines.append(
    f"  a cycle: {found['flops'] / 1e9:.1f} GFLOP,"
    f" {giga(found['hbm_bytes'])} of main memory; estimate"
    f" {milli(found['seconds'])},"
    f" compiler's {milli(found['compiler_seconds'])},"
    f" bound {milli(found['bound_seconds'])}"
  )
  for name, stage in found["stages"].items():
    seconds = stage["seconds"]
    if seconds["total"] < 5e-7:
      continue
    lines.append(
      f"    {name:8} {milli(seconds['total']):>11}:"
      f" {giga(stage['bytes']):>9} {milli(seconds['memory'])},"
      f" products {milli(seconds['compute'])},"
      f" links {milli(seconds['network'])},"
      f" small operations {milli(seconds['small'])}"
    )
    lines += _links(stage["collectives"])
  in_place = "in place" if found["caches_in_place"] else "COPIED"
  copies = ", ".join(f"{n} {k}" for k, n in found["cache_copies"].items())
  lines.append(
    f"  caches {in_place}; copies of a cache array: {copies or 'none'};"
    f" host transfers: {', '.join(found['host_transfers']) or 'none'}"
  )
  return "\n".join(lines)


def _links(collectives: dict) -> list[str]:
  return [
    f"             {count:.0f} {kind}, {moved / 1e6:.2f} MB"
    for kind, (count, moved) in collectives.items()
  ]


def table(found: dict[str, dict], configs: list[Shapes]) -> str:
  """Markdown: decoding, then train steps."""
  decode = [
    "| model | slice, mesh | drafter, tree | GB/chip | plain ms | cycle ms"
    " | bound ms | of bound | plain tokens/s | tau | tokens/s | ratio"
    " | ratio, compiler's cycles | bound's ratio | breaks even at tau |",
    "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
  ]
  train = [
    "| model | slice, mesh | drafter | GB/chip | fits | TFLOP a chip | ms at"
    " best |",
    "|---|---|---|---:|---|---:|---:|",
  ]
  number = lambda x, digits=2: "" if x is None else f"{x:.{digits}f}"
  shapes = {s.name: s for s in configs}
  for name, one in found.items():
    if one["config"] not in shapes:
      continue
    s = shapes[one["config"]]
    memory = f"{one['bytes_per_chip']['all'] / 1e9:.1f}"
    _, _, drafter = one["program"].partition(" ")
    mesh = "".join(f", {p}" for p in name.split(" | ") if "mesh" in p)
    where = f"| {s.name} | {one['topology']}{mesh} |"
    if one["what"] == "train":
      train.append(
        f"{where} {drafter} | {memory} | {'yes' if one['fits'] else 'NO'} |"
        f" {one['step']['flops'] / 1e12:.1f} |"
        f" {one['seconds']['total'] * 1e3:.0f} |"
      )
      continue
    plain = found.get(name.replace(one["program"], "plain"))
    if one["what"] == "plain" or plain is None:
      continue
    draft = s.drafts[drafter]
    spec = draft.spec
    p = roofline.predict(plain, one, draft.tau)
    roof, bound = p["seconds"], p["bound_seconds"]
    decode.append(
      f"{where} {drafter}, M={spec.num_nodes} L={spec.levels}"
      f" branch {spec.branch} | {memory} | {plain['seconds'] * 1e3:.2f} |"
      f" {one['seconds'] * 1e3:.2f} | {one['bound_seconds'] * 1e3:.2f} |"
      f" {one['bound_seconds'] / one['seconds']:.0%} |"
      f" {roof['plain_tokens_per_s']:.0f} | {number(draft.tau)} |"
      f" {number(roof['tokens_per_s'], 0)} | {number(roof['ratio'])} |"
      f" {number(p['compiler_seconds']['ratio'])} |"
      f" {number(bound['ratio'])} | {roof['break_even_tau']:.2f} |"
    )
  parts = [lines for lines in (decode, train) if len(lines) > 2]
  return "\n\n".join("\n".join(lines) for lines in parts)
