"""One training step: what it carries, what it reads, how it is laid out.

  batch [B, T]  --target-->  features  --drafter, U times-->  losses
       |                                                         |
       +-- worked off in `accumulate` parts of rows --+     gradients
                                                      |          |
                                     summed over the parts, then AdamW

The losses of a part are divided by the rows of the whole batch, so that the
parts' sum is the batch's loss whatever they hold.
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.sharding import Mesh

from eagle_jax import sharding
from eagle_jax.config import LayerConfig
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.training import losses
from eagle_jax.training.config import TrainConfig, recipe
from eagle_jax.training.losses import Batch


@struct.dataclass
class TrainState:
  """Donated to each step.

  params: the trained entries, float32 (AdamW's steps are too small for
  bfloat16). key: uint32[2], the run's noise; a step folds its number in.
  """

  step: Array
  params: dict
  optimizer: optax.OptState
  key: Array


@struct.dataclass
class Frozen:
  """What a step reads and nothing changes.

  target: the target's parameters. drafter: the drafter's entries that are not
  trained. head: [D, W], the target's head cut to the vocabulary, int32[W].
  """

  target: dict
  drafter: dict
  head: Array
  vocabulary: Array


@struct.dataclass
class Networks:
  """The two modules; taps of the target are what the drafter fuses."""

  target: Target = struct.field(pytree_node=False)
  drafter: Drafter = struct.field(pytree_node=False)


def split(params: dict, train_head: bool) -> tuple[dict, dict]:
  """(trainable, frozen) top-level entries of a drafter's parameters."""
  frozen = {"embed_tokens"} | (set() if train_head else {"lm_head"})
  return (
    {k: v for k, v in params.items() if k not in frozen},
    {k: v for k, v in params.items() if k in frozen},
  )


def learning_rate(c: TrainConfig, total: int) -> optax.Schedule:
  """step -> learning rate, for a run of `total` steps."""
  if c.schedule == "cosine":
    return optax.warmup_cosine_decay_schedule(
      0.0, c.learning_rate, c.warmup_steps, total, c.learning_rate * 0.01
    )
  return optax.join_schedules(
    [
      optax.linear_schedule(0.0, c.learning_rate, c.warmup_steps),
      optax.linear_schedule(c.learning_rate, 0.0, total - c.warmup_steps),
    ],
    [c.warmup_steps],
  )


def make_optimizer(c: TrainConfig, total: int) -> optax.GradientTransformation:
  if c.warmup_steps >= total:
    raise InputError(
      f"warmup_steps {c.warmup_steps} must be below the run's {total} steps"
    )
  clips = []
  if c.clip_norm:
    clips.append(optax.clip_by_global_norm(c.clip_norm))
  if c.clip_value:
    clips.append(optax.clip(c.clip_value))
  return optax.chain(
    *clips,
    optax.adamw(
      learning_rate(c, total), c.beta1, c.beta2, weight_decay=c.weight_decay
    ),
  )


def initial_state(
  c: TrainConfig, optimizer: optax.GradientTransformation, params: dict
) -> TrainState:
  """Step 0 of a run from these trainable parameters, which are copied."""
  params = jax.tree.map(lambda a: jnp.array(a, jnp.float32), params)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    optimizer=optimizer.init(params),
    key=jax.random.key_data(jax.random.key(c.seed)),
  )


def with_features(n: Networks, target_params: dict, batch: Batch) -> Batch:
  """The batch with the target's features, where they are not kept ones."""
  if batch.features is not None:
    return batch
  fused, final = losses.target_features(
    n.target, target_params, batch.tokens, batch.documents, batch.positions
  )
  return batch.replace(features=fused, final=final)


def add_noise(batch: Batch, width: float, keys: Array) -> Batch:
  """U(-1, 1) * width * 512 / document length on the fused features.

  Args:
    keys: one a row, so that a row's noise depends on no other row.
  """
  draw = lambda key: jax.random.uniform(
    key, batch.features.shape[1:], minval=-1.0, maxval=1.0
  )
  scale = width * 512 / losses.document_lengths(batch)
  noise = jax.vmap(draw)(keys) * scale[..., None]
  return batch.replace(
    features=batch.features + noise.astype(batch.features.dtype)
  )


def whole(tree: dict, config: LayerConfig, mesh: Mesh) -> dict:
  """Weights as they are used: cut over tensor, whole over fsdp.

  Stated for each weight, XLA gathers it where a layer reads it and the batch
  stays shared out. Left to itself it keeps the weights cut along D and sums up
  every activation of the whole batch instead.
  """
  places = sharding.parameters(tree, config, mesh, "decode", lambda line: None)
  return jax.lax.with_sharding_constraint(tree, places)


def gathered(frozen: Frozen, n: Networks, mesh: Mesh) -> Frozen:
  """`whole`, of all that is frozen."""
  head = {"lm_head": {"kernel": frozen.head}}
  return frozen.replace(
    target=whole(frozen.target, n.target.config, mesh),
    drafter=whole(frozen.drafter, n.drafter.config, mesh),
    head=whole(head, n.drafter.config, mesh)["lm_head"]["kernel"],
  )


def make_gradients(c: TrainConfig, n: Networks, mesh: Mesh):
  """(params, frozen, batch, key) -> (loss, report, gradients).

  Pure. Noise and anchors are drawn from the key for the whole batch, so they
  do not depend on the mesh or on `accumulate`.
  """
  what = recipe(c)
  V = n.drafter.config.vocab_size

  def gradients(params, frozen: Frozen, batch: Batch, key):
    noise_key, anchor_key = jax.random.split(key)
    B = batch.tokens.shape[0]
    anchors = None
    if c.anchor_rows:
      anchors = losses.draw_anchors(batch, c.anchor_rows, anchor_key)
    known = losses.inside(frozen.vocabulary, V)
    counts = losses.count(batch, known, c.unroll_steps, anchors)

    def part_of(x):
      """Rows i, i + A, ... are part i: each device keeps its own rows."""
      x = x.reshape(B // c.accumulate, c.accumulate, *x.shape[1:])
      return jnp.swapaxes(x, 0, 1)

    def one(part):
      batch, anchors, keys = part
      # within a part, so that no weight is whole from one to the next
      used = gathered(frozen, n, mesh)
      batch = with_features(n, used.target, batch)
      if c.feature_noise:
        batch = add_noise(batch, c.feature_noise, keys)

      def loss_of(params):
        params = whole(params, n.drafter.config, mesh)
        return losses.losses(
          n.drafter,
          params | used.drafter,
          batch,
          used.vocabulary,
          used.head,
          what,
          anchors,
          counts,
        )

      (loss, report), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
      return loss, report, grads

    every = (batch, anchors, jax.random.split(noise_key, B))
    if c.accumulate == 1:
      return one(every)
    parts = jax.tree.map(part_of, every)
    made = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), made)
    add = lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None)
    return jax.lax.scan(add, zeros, parts)[0]

  return gradients


def make_train_step(
  c: TrainConfig,
  n: Networks,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
):
  """(state, frozen, batch) -> (state, report). Pure and unjitted."""
  gradients = make_gradients(c, n, mesh)

  def train_step(state: TrainState, frozen: Frozen, batch: Batch):
    key = jax.random.wrap_key_data(state.key)
    key = jax.random.fold_in(key, state.step)
    loss, report, grads = gradients(state.params, frozen, batch, key)
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    report |= {"loss": loss, "grad_norm": optax.global_norm(grads)}
    state = state.replace(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      optimizer=moments,
    )
    return state, report

  return train_step


def make_eval_step(c: TrainConfig, n: Networks, mesh: Mesh):
  """(params, frozen, batch) -> report, over all rows and without noise."""

  def eval_step(params, frozen: Frozen, batch: Batch):
    params = whole(params, n.drafter.config, mesh)
    frozen = gathered(frozen, n, mesh)
    batch = with_features(n, frozen.target, batch)
    known = losses.inside(frozen.vocabulary, n.drafter.config.vocab_size)
    return losses.losses(
      n.drafter,
      params | frozen.drafter,
      batch,
      frozen.vocabulary,
      frozen.head,
      recipe(c),
      None,
      losses.count(batch, known, c.unroll_steps, None),
    )[1]

  return eval_step


# Layout ---------------------------------------------------------------------


def frozen_shardings(frozen: Frozen, n: Networks, mesh: Mesh, say) -> Frozen:
  """Of `Frozen` (arrays or shapes): cut over fsdp and tensor."""
  head = {"lm_head": {"kernel": frozen.head}}
  drafted = lambda tree: sharding.parameters(
    tree, n.drafter.config, mesh, "train", lambda line: None
  )
  return Frozen(
    target=sharding.parameters(
      frozen.target, n.target.config, mesh, "train", say
    ),
    drafter=drafted(frozen.drafter),
    head=drafted(head)["lm_head"]["kernel"],
    vocabulary=sharding.replicated(mesh),
  )


def state_shardings(
  state: TrainState,
  optimizer: optax.GradientTransformation,
  n: Networks,
  mesh: Mesh,
  say,
) -> TrainState:
  """Of a state (arrays or shapes): moments lie as their parameters do."""
  everywhere = sharding.replicated(mesh)
  params = sharding.parameters(
    state.params, n.drafter.config, mesh, "train", say
  )
  return TrainState(
    step=everywhere,
    params=params,
    optimizer=optax.tree_map_params(
      optimizer,
      lambda _, place: place,
      state.optimizer,
      params,
      transform_non_params=lambda _: everywhere,
    ),
    key=everywhere,
  )


def jit_train_step(step, state: TrainState, frozen: Frozen, mesh: Mesh):
  """The step compiled for these places (trees of shardings)."""
  return jax.jit(
    step,
    in_shardings=(state, frozen, sharding.batch(mesh, "train")),
    out_shardings=(state, sharding.replicated(mesh)),
    donate_argnums=0,
  )
