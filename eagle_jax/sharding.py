"""Which device holds which part of which array. Two tables, no catch-all.

The mesh has three axes, slowest network first:

  data    copies of everything; each takes its share of the batch
  fsdp    parameters are cut along the width D and gathered where used; the
          batch is shared out too (training)
  tensor  heads, mlp rows and vocabulary are cut (Megatron-style); XLA adds
          one sum after o_proj and one after down_proj

A parameter's path gives the logical axes of its dimensions (`RULES`), a
preset says which mesh axis cuts each logical axis (`PRESETS`):

  layers_3/self_attn/q_proj/kernel  [D, N * H]
  RULES           embed    heads
  train           fsdp     tensor
  decode          -        tensor

Drafters go by the same table. In training that is for memory: with its float32
master weights and Adam's two moments a drafter of an 8B target takes 16 bytes
for each of 400M parameters, too much for every chip of a slice. In decoding it
is for time: a draft level is one read of the drafter's weights, which `tensor`
chips share; the two sums a level cost microseconds.
"""

import re
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.checkpoints import tensors
from eagle_jax.config import DrafterConfig, LayerConfig
from eagle_jax.errors import InputError
from eagle_jax.speculation.state import DecodeState, Models

AXES = ("data", "fsdp", "tensor")

_LAYER = r"(?:layers_\d+/)?"  # a drafter's one layer has no number
_MLP = _LAYER + r"mlp/(?:experts/)?"

# (parameter path, a logical axis for each dimension). A rule is for a path and
# a number of dimensions; each parameter has exactly one.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
  # ids are spread over the chips: a lookup fetches rows from where they lie
  (r"embed_tokens/embedding", ("vocab", "embed")),
  (r"lm_head/kernel", ("embed", "head_vocab")),
  # a query group stays with its kv head: both are cut along the same heads
  (_LAYER + r"self_attn/q_proj/kernel", ("embed", "heads")),
  (_LAYER + r"self_attn/[kv]_proj/kernel", ("embed", "kv_heads")),
  (_LAYER + r"self_attn/q_proj/bias", ("heads",)),
  (_LAYER + r"self_attn/[kv]_proj/bias", ("kv_heads",)),
  (_LAYER + r"self_attn/o_proj/kernel", ("heads", "embed")),
  (_LAYER + r"self_attn/[qk]_norm/scale", ("norm",)),
  (_MLP + r"(?:gate|up)_proj/kernel", ("embed", "mlp")),
  (_MLP + r"down_proj/kernel", ("mlp", "embed")),
  # experts are each cut like one mlp, never shared out whole: the few rows of
  # a draft tree would leave the chips of unchosen experts idle
  (_MLP + r"(?:gate|up)_proj/kernel", ("expert", "embed", "mlp")),
  (_MLP + r"down_proj/kernel", ("expert", "mlp", "embed")),
  (_LAYER + r"mlp/router/kernel", ("embed", "expert")),
  (_LAYER + r"(?:input|post_attention)_layernorm/scale", ("norm",)),
  (r"norm/scale", ("norm",)),
  # a drafter's own
  (r"hidden_norm/scale", ("norm",)),
  (r"fc_norm_\d+/scale", ("norm",)),
  (r"input_norm/scale", ("norm",)),
  (r"fc/kernel", ("fused", "embed")),
  (r"fc/bias", ("norm",)),
)

# Logical axis -> mesh axis (None: whole on every device).
_TENSOR = {
  "vocab": "tensor",
  "head_vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "expert": None,
  "fused": None,
  "norm": None,
}
PRESETS = {
  "train": _TENSOR | {"embed": "fsdp", "batch": ("data", "fsdp")},
  "decode": _TENSOR | {"embed": None, "batch": "data"},
}

Table = dict[str, str | tuple[str, ...] | None]


def mesh_sizes(given: Sequence[str]) -> tuple[int, ...]:
  """Sizes from a flag's texts, for `make_mesh`."""
  try:
    return tuple(int(size) for size in given)
  except ValueError:
    raise InputError(
      f"mesh {','.join(given)!r} must be numbers: data,fsdp,tensor"
    ) from None


def make_mesh(sizes: Sequence[int], devices=None) -> Mesh:
  """The (data, fsdp, tensor) mesh; the only place that makes one.

  Args:
    sizes: devices along each axis; one 0 stands for what is left over.
    devices: all of them where None; described ones for ahead-of-time
      compilation.

  Raises:
    InputError: sizes that are not the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  shape, count = list(sizes), len(devices)
  what = f"mesh {tuple(sizes)} (data, fsdp, tensor)"
  if len(shape) != 3 or min(shape) < 0 or shape.count(0) > 1:
    raise InputError(
      f"{what} must be three sizes, one of them 0 at most (the rest)"
    )
  if 0 in shape:
    known = 1
    for size in shape:
      known *= size or 1
    shape[shape.index(0)] = count // known
  if shape[0] * shape[1] * shape[2] != count:
    raise InputError(
      f"{what} does not fit {count} devices: its sizes must multiply to that"
    )
  return jax.make_mesh(
    tuple(shape), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
  )


def check_batch(mesh: Mesh, batch_size: int) -> None:
  """Refuses a batch that cannot be shared out in decoding."""
  data = mesh.shape["data"]
  if batch_size % data:
    raise InputError(
      f"batch_size {batch_size} does not divide over the mesh's data axis of"
      f" {data}: give a multiple, or data 1"
    )


def decode_mesh(sizes: Sequence[int], batch_size: int) -> Mesh:
  """A mesh of this process's devices to decode over.

  Raises:
    InputError: sizes that do not fit the devices or the batch, or fsdp
      devices, which would hold whole copies for nothing.
  """
  mesh = make_mesh(sizes)
  fsdp = mesh.shape["fsdp"]
  if fsdp > 1:
    raise InputError(
      f"mesh {tuple(sizes)} has {fsdp} fsdp devices, which only training uses:"
      " make them tensor or data ones"
    )
  check_batch(mesh, batch_size)
  return mesh


def ways(mesh: Mesh, axes: str | tuple[str, ...] | None) -> int:
  """Into how many parts these mesh axes cut a dimension."""
  total = 1
  for axis in (axes,) if isinstance(axes, str) else axes or ():
    total *= mesh.shape[axis]
  return total


def _sizes(config: LayerConfig) -> dict[str, int]:
  """How many units of each logical axis may be dealt out."""
  drafted = isinstance(config, DrafterConfig)
  return {
    "vocab": config.vocab_size,
    "head_vocab": config.draft_vocab_size if drafted else config.vocab_size,
    "embed": config.hidden_size,
    "mlp": config.mlp_size,
    "heads": config.num_heads,
    "kv_heads": config.num_kv_heads,
  }


def table(
  config: LayerConfig,
  mesh: Mesh,
  preset: str,
  say: Callable[[str], None],
) -> Table:
  """The preset's logical -> mesh axes, as far as this model divides.

    N = 32, K = 8,  8 ways   q 4 heads a chip, k v 1: groups stay together
    N = 32, K = 8, 16 ways   q 2 heads a chip, k v whole on every chip
    N = 9,  K = 3,  4 ways   attention whole on every chip; mlp and vocabulary
                             are cut

  A vocabulary that does not divide is whole on every chip too.

  Args:
    say: gets one line for each part that stays whole.

  Raises:
    InputError: a width or an mlp that does not divide.
  """
  axes = dict(PRESETS[preset])
  sizes = _sizes(config)
  what = "drafter" if isinstance(config, DrafterConfig) else "target"
  whole = {
    name
    for name in ("heads", "kv_heads", "vocab", "head_vocab")
    if sizes[name] % ways(mesh, axes[name])
  }
  for name in sorted(whole):
    if name == "kv_heads" and "heads" in whole:
      continue
    part = "its attention" if name == "heads" else "they"
    say(
      f"note: the {what}'s {sizes[name]} {name} do not divide over"
      f" {ways(mesh, axes[name])} tensor devices: {part} will be whole on each"
    )
  if "heads" in whole:  # k and v alone would be cut for nothing
    whole.add("kv_heads")
  axes |= dict.fromkeys(whole)
  for name in ("embed", "mlp"):
    if sizes[name] % ways(mesh, axes[name]):
      field = {"embed": "hidden_size", "mlp": "mlp_size"}[name]
      raise InputError(
        f"the {what}'s {field} {sizes[name]} does not divide over"
        f" {ways(mesh, axes[name])} {axes[name]} devices: choose another mesh"
      )
  return axes


def logical_axes(path: str, ndim: int) -> tuple[str, ...] | str:
  """The one rule of a parameter, or what is wrong with it."""
  found = [
    axes
    for pattern, axes in RULES
    if len(axes) == ndim and re.fullmatch(pattern, path)
  ]
  if len(found) != 1:
    return f"{path} ({ndim} dimensions) matches {len(found)} rules"
  return found[0]


def specs(params: dict, axes: Table) -> dict:
  """PartitionSpecs of a tree of parameters (arrays or shapes).

  Raises:
    InputError: names every path without exactly one rule.
  """
  found, problems = {}, []
  for path, leaf in tensors.flatten(params).items():
    logical = logical_axes(path, len(leaf.shape))
    if isinstance(logical, str):
      problems.append(logical)
    else:
      found[path] = P(*(axes[name] for name in logical))
  if problems:
    raise InputError(
      f"no sharding for {'; '.join(problems)}: each parameter needs exactly one"
      " line in eagle_jax/sharding.py"
    )
  return tensors.nest(found)


def parameters(
  params: dict,
  config: LayerConfig,
  mesh: Mesh,
  preset: str,
  say: Callable[[str], None],
) -> dict:
  """NamedShardings of a target's or drafter's parameters (arrays or shapes)."""
  tree = specs(params, table(config, mesh, preset, say))
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    tree,
    is_leaf=lambda x: isinstance(x, P),
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def batch(mesh: Mesh, preset: str) -> NamedSharding:
  """Of arrays whose first dimension is the batch."""
  return NamedSharding(mesh, P(PRESETS[preset]["batch"]))


def decode_models(m: Models, mesh: Mesh) -> Models:
  """NamedShardings of what a decode cycle reads (arrays or shapes)."""
  of = lambda params, module: (
    parameters(params, module.config, mesh, "decode", lambda line: None)
    if module is not None
    else None
  )
  return m.replace(
    target_params=of(m.target_params, m.target),
    drafter_params=of(m.drafter_params, m.drafter),
    vocabulary=None if m.vocabulary is None else replicated(mesh),
    ends=replicated(mesh),
  )


def decode_state(state: DecodeState, m: Models, mesh: Mesh) -> DecodeState:
  """NamedShardings of a decode state (arrays or shapes).

  caches    [B, K, ..]    data, tensor (K as k_proj is cut)
  the rest  [B, ...]      data
  """
  rows = batch(mesh, "decode")

  def of_cache(cache, module):
    if module is None:
      return cache
    axes = table(module.config, mesh, "decode", lambda line: None)
    spec = P(axes["batch"], axes["kv_heads"], None, None)
    return jax.tree.map(lambda _: NamedSharding(mesh, spec), cache)

  return jax.tree.map(lambda _: rows, state).replace(
    cache=of_cache(state.cache, m.target),
    draft_cache=of_cache(state.draft_cache, m.drafter),
  )


def shapes(tree, shardings):
  """ShapeDtypeStructs on a mesh, for compiling without any array."""
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    tree,
    shardings,
  )
