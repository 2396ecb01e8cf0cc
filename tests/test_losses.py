"""Unrolled training equals sequential decoding; packing equals documents."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax.models import kv_cache, masks
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.training import chats, data, losses


def documents(sizes, seed=0):
  rng = np.random.default_rng(seed)
  made = []
  for n in sizes:
    mask = np.zeros(n, bool)
    mask[n // 3 :] = True
    made.append(
      chats.Document(rng.integers(0, tiny.V, n).astype(np.int32), mask)
    )
  return made


def recipe(steps: int, chunk: int = 0, remat: bool = False) -> losses.Recipe:
  return losses.Recipe(steps, 0.8, 1.0, 0.1, chunk, remat)


def losses_of(drafter, params, batch, recipe, anchors=None):
  """`losses.losses` with the drafter's own head as the target's."""
  vocabulary = jnp.asarray(drafter.vocabulary)
  known = losses.inside(vocabulary, drafter.config.vocab_size)
  return losses.losses(
    Drafter(drafter.config),
    params,
    batch,
    vocabulary,
    drafter.params["lm_head"]["kernel"],
    recipe,
    anchors,
    losses.count(batch, known, recipe.steps, anchors),
  )


def pack(docs, T):
  """All packed rows, by attribute."""
  sizes = [len(d.ids) for d in docs]
  packed = data.pack_windows(docs, sizes, T, len(docs), "cut")
  return types.SimpleNamespace(**packed.everything())


def batch_of(target, drafter, packed, rows=slice(None)):
  network = Target(target.config, drafter.config.taps)
  parts = [
    getattr(packed, n)[rows]
    for n in ("tokens", "mask", "documents", "positions")
  ]
  fused, final = losses.target_features(
    network, target.params, parts[0], parts[2], parts[3]
  )
  return losses.Batch(*map(jnp.asarray, parts), fused, final)


@pytest.mark.parametrize("variant", ["eagle", "window", *tiny.VARIANTS])
def test_training_steps_equal_sequential_decoding(variant):
  """Step i, row t of the unrolled pass is what a decoder computes that reads
  t + 1 true pairs and then feeds its own output back i times."""
  target = tiny.target(num_layers=2)
  if variant == "eagle":
    drafter = tiny.drafter(target, "eagle")
  else:
    changes = tiny.VARIANTS | {"window": {"sliding_window": 4}}
    drafter = tiny.drafter(target, taps=(0, 1, 2), **changes[variant])
  packed = pack(documents([13]), 13)
  batch = batch_of(target, drafter, packed)
  module = Drafter(drafter.config)
  run = lambda *a, **k: module.apply({"params": drafter.params}, *a, **k)
  outs = losses.unroll(module, drafter.params, batch, 3, None, False)
  tokens = np.asarray(batch.tokens)
  c = drafter.config
  for t in (0, 4, 8):
    n = t + 1
    cache = kv_cache.init(1, 1, c.num_kv_heads, 16, c.head_size, jnp.float32)
    out, rows = run(
      tokens[:, 1 : n + 1],
      run(batch.features[:, :n], method="fuse"),
      jnp.arange(n)[None],
      masks.Attend(own=masks.Causal()),
      None,
      None,
      (),
    )
    cache = kv_cache.commit(cache, (rows,), jnp.zeros(1, jnp.int32))
    fed = out[:, -1:]
    for i in range(3):
      np.testing.assert_allclose(fed[0, 0], outs[i][0, t], atol=2e-5)
      np.testing.assert_allclose(
        run(fed[0, 0], method="logits"),
        run(outs[i][0, t], method="logits"),
        atol=1e-4,
      )
      fed, rows = run(
        tokens[:, n + 1 + i : n + 2 + i],
        fed,
        jnp.full((1, 1), n + i),
        masks.Attend(own=masks.Itself(), length=jnp.array([n + i])),
        cache[0],
        None,
        (),
      )
      # a drafted row's own position is that of its pair: t + 1 + i
      cache = kv_cache.commit(cache, (rows,), jnp.array([n + i]))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_packed_equals_documents_alone(kind):
  """Sums over a packed row are the sums over its documents; so are grads."""
  target = tiny.target()
  drafter = tiny.drafter(target, kind)
  docs = documents([17, 9, 12])

  def sums(params, batch):
    report = losses_of(drafter, params, batch, recipe(3))[1]
    total = jnp.sum(report["feature"] + 0.1 * report["vocabulary"])
    return total, report

  grad = jax.jit(jax.grad(sums, has_aux=True))
  whole = grad(drafter.params, batch_of(target, drafter, pack(docs, 40)))
  alone = [
    grad(drafter.params, batch_of(target, drafter, pack([d], 40))) for d in docs
  ]
  added = jax.tree.map(lambda *x: sum(x), *alone)
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(added), strict=True):
    scale = np.abs(b).max() + 1e-6
    np.testing.assert_allclose(a / scale, b / scale, atol=1e-5)
  assert whole[1]["rows"][0] > 0


def test_counted_rows_match_their_definition():
  packed = pack(documents([11, 6, 8]), 16)
  batch = losses.Batch(
    *(
      jnp.asarray(getattr(packed, n))
      for n in ("tokens", "mask", "documents", "positions")
    ),
    None,
    None,
  )
  B, T = packed.tokens.shape
  for step in range(3):
    got = np.asarray(losses.counted(batch, step))
    for b in range(B):
      for t in range(T):
        last = t + 2 + step
        want = last < T and packed.documents[b, t] > 0
        want = (
          want
          and (
            packed.documents[b, t : last + 1] == packed.documents[b, t]
          ).all()
        )
        want = want and packed.mask[b, t + 1 : last + 1].all()
        assert got[b, t] == want


def test_metrics_count_tokens_outside_the_draft_vocabulary_as_misses():
  """The vocabulary loss leaves them out, rows and hits do not."""
  target = tiny.target()
  drafter = tiny.drafter(target, W=8)
  batch = batch_of(target, drafter, pack(documents([30]), 30))
  _, report = losses_of(drafter, drafter.params, batch, recipe(1))
  following = np.asarray(losses.shift(batch.tokens, 2))
  rows = np.asarray(losses.counted(batch, 0))
  known = rows & np.isin(following, drafter.vocabulary)
  assert report["rows"][0] == rows.sum() > known.sum()
  assert report["vocabulary_rows"][0] == known.sum()


def test_acceptance_chain():
  report = {
    "rows": np.array([10.0, 10.0, 8.0]),
    "chain": np.array([5.0, 2.0, 0.8]),
  }
  zeros = np.zeros(3)
  others = ("hits", "feature", "vocabulary", "vocabulary_rows")
  figures = losses.figures(report | dict.fromkeys(others, zeros))
  np.testing.assert_allclose(figures["alpha"], [0.5, 0.4, 0.5])
  np.testing.assert_allclose(figures["tau"], 1 + 0.5 + 0.2 + 0.1)


@pytest.mark.parametrize(
  ("kind", "window"), [("eagle", None), ("eagle3", None), ("eagle", 4)]
)
def test_anchor_rows_give_what_all_rows_give_there(kind, window):
  """Leaving rows out after step 0 changes no output of the others."""
  target = tiny.target()
  drafter = tiny.drafter(target, kind, sliding_window=window)
  batch = batch_of(target, drafter, pack(documents([17, 9, 12]), 40))
  module = Drafter(drafter.config)
  anchors = losses.draw_anchors(batch, 12, jax.random.key(0))
  chosen = np.asarray(anchors[0])
  assert len(set(chosen.tolist())) == 12
  assert np.asarray(losses.counted(batch, 0))[0, chosen].all()
  every = losses.unroll(module, drafter.params, batch, 3, None, False)
  some = losses.unroll(module, drafter.params, batch, 3, anchors, True)
  for i, (a, b) in enumerate(zip(every, some, strict=True)):
    rows = np.asarray(losses.counted(batch, i))[0, chosen]
    assert rows.any()
    np.testing.assert_allclose(
      a[0, chosen][rows], b[0][rows], atol=2e-5, rtol=1e-5
    )


def test_losses_of_all_rows_as_anchors_are_the_plain_losses():
  target = tiny.target()
  drafter = tiny.drafter(target)
  batch = batch_of(target, drafter, pack(documents([17, 9]), 30))
  run = lambda anchors: losses_of(
    drafter, drafter.params, batch, recipe(3), anchors
  )
  plain, report = run(None)
  shuffled = np.random.default_rng(0).permutation(30)[None]
  again, other = run(jnp.asarray(shuffled))
  np.testing.assert_allclose(again, plain, rtol=1e-5)
  for name in report:
    np.testing.assert_allclose(other[name], report[name], rtol=1e-5)


def test_chunks_and_recomputation_change_no_value():
  """Also where the rows do not fill the last chunk."""
  target = tiny.target(num_layers=1)
  drafter = tiny.drafter(target, "eagle")
  batch = batch_of(target, drafter, pack(documents([17, 9]), 30))
  grad = lambda recipe: jax.jit(
    jax.value_and_grad(lambda p: losses_of(drafter, p, batch, recipe)[0])
  )(drafter.params)
  loss, grads = grad(recipe(2))
  chunked, others = grad(recipe(2, chunk=7, remat=True))
  np.testing.assert_allclose(chunked, loss, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6 * (np.abs(b).max() + 1))


def test_chunks_need_a_fifth_of_the_memory():
  """By XLA's account, for one row of 2,048 tokens and 128k ids."""
  T, D, V = 2048, 8, 131072
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)

  def temporary(chunk: int) -> int:
    def total(kernel, out, final, target_head):
      head = lambda x: jnp.matmul(x, kernel)
      cross, _ = losses.against_target(head, out, final, target_head, chunk)
      return jnp.sum(cross)

    lowered = jax.jit(jax.grad(total, argnums=(0, 1))).lower(
      shape(D, V), shape(1, T, D), shape(1, T, D), shape(D, V)
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert 5 * temporary(128) < temporary(0)


def test_a_drafter_of_another_width_regresses_no_feature():
  target = tiny.target(num_layers=2)
  drafter = tiny.drafter(target, taps=(0, 1, 2), **tiny.VARIANTS["own width"])
  batch = batch_of(target, drafter, pack(documents([17]), 20))
  table = target.params["embed_tokens"]["embedding"]
  vocabulary = jnp.asarray(drafter.vocabulary)
  known = losses.inside(vocabulary, drafter.config.vocab_size)
  run = lambda weight: losses.losses(
    Drafter(drafter.config),
    drafter.params,
    batch,
    vocabulary,
    table[drafter.vocabulary].T,
    losses.Recipe(2, 0.8, weight, 1.0, 0, False),
    None,
    losses.count(batch, known, 2, None),
  )
  loss, report = run(0.0)
  assert np.isfinite(loss)
  assert loss > 0
  assert not report["feature"].any()
  with pytest.raises(ValueError, match="width 24"):
    run(1.0)
