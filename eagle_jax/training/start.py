"""Where a drafter starts: another drafter, the target's last layer, or chance.

A drafter continues the target's residual stream one token further, which is
close to what the target's last layer does; starting from a copy of it is
worth several points of acceptance on little data.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from eagle_jax import loading, sharding
from eagle_jax.checkpoints import tensors
from eagle_jax.checkpoints.drafters import target_rows
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.errors import InputError, differences
from eagle_jax.loading import LoadedTarget
from eagle_jax.models import masks
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target

FLOOR = 1e-3  # of 1 / s, so that no element near zero is divided by
QKV = re.compile(r"self_attn/[qkv]_proj/kernel")
SAMPLE = 64  # tokens of the pass that measures the residual stream


def random(config: DrafterConfig, seed: int) -> dict:
  ids = jnp.zeros((1, 1), jnp.int32)
  return Drafter(config).init(
    jax.random.key(seed),
    ids,
    jnp.zeros((1, 1, config.read_size), config.dtype),
    ids,
    method="everything",
  )["params"]


def residual_size(target: LoadedTarget) -> Array:
  """float32[]: RMS of the residual stream that the final norm reads, the
  median over tokens drawn evenly from the vocabulary (the first of a sequence
  is an outlier in most models)."""
  c = target.config
  ids = jnp.linspace(0, c.vocab_size - 1, SAMPLE).astype(jnp.int32)[None]
  network = Target(c, (c.num_layers,))  # the output of the last layer

  @jax.jit
  def size(params):
    out, _ = network.apply(
      {"params": params},
      ids,
      jnp.arange(SAMPLE)[None],
      masks.Attend(own=masks.Causal()),
      None,
    )
    return jnp.median(jnp.sqrt(jnp.mean(jnp.square(out.taps), axis=-1)))

  return size(target.params).astype(jnp.float32)


def _on_features(layer: dict, final: Array, size: Array | float) -> dict:
  """A target layer, which works on the residual stream x, for an EAGLE-1
  layer, which works on features and has no input norm:

    f = x / rms(x) * s       s: `final`, scale of the target's last norm

    q k v    read x / rms(x) * s_in     kernel rows    * s_in / s
    mlp      reads x / rms(x) * s_post  norm's scale   * rms(s) / s
    o, down  add to x                   kernel columns * s / rms(x)

  Args:
    size: rms(x), `residual_size`.
  """
  mean_square = jnp.mean(jnp.square(final))
  inverse = final / (jnp.square(final) + FLOOR * mean_square)
  rows = (layer["input_layernorm"]["scale"] * inverse)[:, None]
  made = {}
  for path, leaf in tensors.flatten(layer).items():
    if QKV.fullmatch(path):
      leaf = leaf * rows
    elif path.startswith("post_attention_layernorm/"):
      leaf = leaf * inverse * jnp.sqrt(mean_square)
    elif path.endswith(("o_proj/kernel", "down_proj/kernel")):
      leaf = leaf * (final / size)
    made[path] = leaf
  return tensors.nest(made)


def from_last_layer(
  params: dict,
  config: DrafterConfig,
  target: TargetConfig,
  target_params: dict,
  size: Array | float | None,
) -> dict:
  """Copy the target's last layer; the token half of each input starts near 0.

  kind "eagle3": fc passes the highest tap, the feature half of q/k/v, the
    norms, o and the mlp are the layer's.
  kind "eagle": fc passes the feature; the layer is `_on_features`.

  Args:
    size: `residual_size`; only kind "eagle" needs it.
  """
  same = ("hidden_size", "mlp_size", "num_heads", "num_kv_heads", "head_size")
  other = differences(vars(target), vars(config), same)
  if other:
    raise InputError(
      "init 'last_layer' needs a drafter of the target's layer shape"
      f" ({other}): use init 'random'"
    )
  D = config.hidden_size
  last = target_params[f"layers_{target.num_layers - 1}"]
  if config.kind == "eagle":
    last = _on_features(last, target_params["norm"]["scale"], size)
  flat = tensors.flatten(params)
  for path, leaf in tensors.flatten(last).items():
    if path.startswith("input_layernorm/"):
      continue  # "eagle" has none, "eagle3" names it otherwise
    if config.kind == "eagle3" and QKV.fullmatch(path):
      leaf = jnp.concatenate([flat[path][:D] * 0.1, leaf])
    flat[path] = leaf
  unknown = flat.keys() - tensors.flatten(params).keys()
  if unknown:
    raise InputError(
      f"init 'last_layer' finds no place in the drafter for"
      f" {', '.join(sorted(unknown))}: use init 'random'"
    )
  fc = flat["fc/kernel"] * 0.1
  flat["fc/kernel"] = fc.at[-D:].add(jnp.eye(D, dtype=fc.dtype))
  if config.kind == "eagle3":
    flat["hidden_norm/scale"] = last["input_layernorm"]["scale"]
    flat["norm/scale"] = target_params["norm"]["scale"]
  return jax.tree.map(lambda a: jnp.array(a), tensors.nest(flat))


def placed(tree: dict, places: dict) -> dict:
  """Arrays laid out over a mesh; those that lie so already stay where they are
  (what spans processes cannot pass through one of them)."""

  def put(a, place):
    there = isinstance(a, jax.Array) and a.sharding.is_equivalent_to(
      place, a.ndim
    )
    return a if there else jax.device_put(np.asarray(a), place)

  return jax.tree.map(put, tree, places)


def head_of_target(
  config: DrafterConfig,
  target: LoadedTarget,
  vocabulary: np.ndarray,
  mesh: Mesh,
) -> dict:
  """The target's head cut to the draft vocabulary, on the mesh."""
  rows = lambda params: target_rows(target.config, params, vocabulary)
  if not target.config.tied_head and len(vocabulary) == config.vocab_size:
    return rows(target.params)  # the target's own array
  made = {"lm_head": jax.eval_shape(rows, target.params)}
  places = sharding.parameters(made, config, mesh, "train", lambda line: None)
  return jax.jit(rows, out_shardings=places["lm_head"])(target.params)


def from_drafter(
  name: str,
  config: DrafterConfig,
  target: LoadedTarget,
  vocabulary: np.ndarray,
  mesh: Mesh,
  say,
) -> tuple[dict, np.ndarray]:
  """A trained drafter's parameters, and its draft vocabulary.

  One that scores with the target's own rows is cut anew for `vocabulary`; one
  with a trained head keeps its ids.
  """
  try:
    earlier = loading.load_drafter(name, target, say)
  except InputError as e:
    raise InputError(f"init is not last_layer or random, and {e}") from None
  quiet = lambda line: None
  places = sharding.parameters(
    earlier.params, earlier.config, mesh, "train", quiet
  )
  params = placed(earlier.params, places)
  rows = head_of_target(earlier.config, target, earlier.vocabulary, mesh)
  own = not bool(jnp.array_equal(params["lm_head"]["kernel"], rows["kernel"]))
  free = {"dtype", "max_positions", "draft_noise"}
  free |= set() if own else {"draft_vocab_size"}
  fixed = [n for n in vars(config) if n not in free]
  other = differences(vars(earlier.config), vars(config), fixed)
  if other:
    raise InputError(
      f"init {name!r} is a drafter of another shape ({other}): give the config"
      " its kind, taps, switches and mlp_size"
    )
  if own:
    return params, earlier.vocabulary
  head = head_of_target(config, target, vocabulary, mesh)
  return params | {"lm_head": head}, vocabulary


def parameters(
  init: str,
  seed: int,
  config: DrafterConfig,
  target: LoadedTarget,
  vocabulary: np.ndarray,
  mesh: Mesh,
  say,
) -> tuple[dict, np.ndarray]:
  """Where a run starts, on the mesh, and the draft vocabulary it scores.

  Args:
    init: "last_layer", "random", or a drafter (folder, built-in or hub name).
    target: its parameters lie on the mesh.
    vocabulary: int32[W], from the data; a drafter's own trained head keeps its.
  """
  if init not in ("last_layer", "random"):
    return from_drafter(init, config, target, vocabulary, mesh, say)
  shared = ("embed_tokens", "lm_head")
  copied = init == "last_layer"
  size = residual_size(target) if copied and config.kind == "eagle" else None

  def own(target_params):
    params = random(config, seed)
    if copied:
      params = from_last_layer(
        params, config, target.config, target_params, size
      )
    return {k: v for k, v in params.items() if k not in shared}

  places = sharding.parameters(
    jax.eval_shape(own, target.params), config, mesh, "train", say
  )
  made = jax.jit(own, out_shardings=places)(target.params)
  return made | {
    "embed_tokens": target.params["embed_tokens"],
    "lm_head": head_of_target(config, target, vocabulary, mesh),
  }, vocabulary
