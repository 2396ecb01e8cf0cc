"""Losses and gradients of the original PyTorch training code.

Its masks and denominators differ from our recipes' (see their READMEs), so
they are put on our unrolled outputs and loss terms here.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import drafters, hf_target, tensors
from eagle_jax.models.drafter import Drafter
from eagle_jax.training import losses

EAGLE = ("eagle2_llama", "eagle2_llama_bin", "eagle2_qwen2")
EAGLE3 = ("eagle3_llama", "eagle3_qwen3")
STEPS = 7


def load(golden, case):
  if case.endswith("_bin"):
    pytest.importorskip("torch")
  data = golden(case)
  target, params = hf_target.load(data.folder / "target", "float32")
  loaded = drafters.load(data.folder / "drafter", target, params)
  return loaded, data.arrays, data.facts


def batch_of(tokens, mask, attention, features, final):
  wide = lambda a: jnp.asarray(a, jnp.int32)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return losses.Batch(
    wide(tokens),
    jnp.asarray(mask) > 0,
    wide(attention),  # padding is a document of its own
    wide(positions),
    jnp.asarray(features),
    jnp.asarray(final),
  )


def gradients(loaded, frozen, loss_of):
  """mask -> (loss, what else loss_of gives, gradients by path)."""
  params = loaded.params
  trained = {k: v for k, v in params.items() if k not in frozen}
  fixed = {k: v for k, v in params.items() if k in frozen}
  run = jax.jit(
    jax.value_and_grad(lambda p, mask: loss_of(p | fixed, mask), has_aux=True)
  )

  def call(mask):
    (loss, more), grads = run(trained, mask)
    return loss, more, tensors.flatten(grads)

  return call


def check_gradients(loaded, arrays, prefix, grads):
  """Every tensor's norm, and the small tensors number by number."""
  found = 0
  for key in arrays.files:
    kind, _, name = key.removeprefix(prefix + "/").partition("/")
    if not key.startswith(prefix + "/") or kind not in ("grad", "grad_norm"):
      continue
    rule, match = next(
      (r, m)
      for r in drafters.RULES[loaded.config.kind]
      if (m := re.fullmatch(r.pattern, name))
    )
    got = np.asarray(grads[match.expand(rule.path)])
    want = arrays[key]
    if kind == "grad_norm":
      assert np.linalg.norm(got) == pytest.approx(float(want), rel=1e-4), name
      found += 1
    else:
      got = got.T if rule.transpose else got
      np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
  return found


def total_norm(grads) -> float:
  return float(np.sqrt(sum(np.sum(np.square(g)) for g in grads.values())))


@pytest.mark.parametrize("case", EAGLE)
def test_eagle1_losses_and_gradients(golden, case):
  loaded, arrays, facts = load(golden, case)
  a, want = lambda name: arrays["train/batch/" + name], facts["train"]
  ids = a("input_ids")  # shifted left already
  tokens = np.concatenate([np.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
  mask = jnp.asarray(a("loss_mask"), jnp.float32)
  batch = batch_of(
    tokens, mask, a("attention_mask"), a("hidden_states"), a("hidden_states")
  )
  next_feature = losses.shift(batch.final, 1)
  np.testing.assert_array_equal(next_feature, a("target"))
  module = Drafter(loaded.config)

  def loss_of(params, mask):
    apply = lambda x, m: module.apply({"params": params}, x, method=m)
    (out,) = losses.unroll(module, params, batch, 1, None, False)
    mean = lambda rows: jnp.sum(mask * rows) / (mask.sum() + 1e-5)
    value = mean(losses.smooth_l1(apply(out, "feature"), next_feature))
    logits = apply(out, "logits")
    scores = apply(next_feature, "logits")  # the same head, the target's
    cross = mean(losses.soft_cross_entropy(scores, logits))
    return value + 0.1 * cross, (value, cross, out)

  run = gradients(loaded, ("embed_tokens", "lm_head"), loss_of)
  loss, (value, cross, out), grads = run(mask)
  real = a("attention_mask") > 0
  np.testing.assert_allclose(
    out[real], arrays["train/predict"][real], rtol=1e-4, atol=1e-4
  )
  assert value == pytest.approx(want["vloss"], rel=1e-4)
  assert cross == pytest.approx(want["ploss"], rel=1e-4)
  assert loss == pytest.approx(want["loss"], rel=1e-4)
  assert total_norm(grads) == pytest.approx(want["grad_norm"], rel=1e-4)
  assert check_gradients(loaded, arrays, "train", grads) == len(grads)


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3_losses_and_gradients(golden, case):
  """Seven unrolled steps; "train_edge" counts targets past a row's end."""
  loaded, arrays, facts = load(golden, case)
  a = lambda name: arrays["train/batch/" + name]
  mask = np.array(a("loss_mask"), np.float32)
  edge = mask.copy()
  edge[np.arange(len(mask)), a("attention_mask").sum(1) - 1] = 1
  target = jnp.asarray(arrays["train/target_logits"])
  features = arrays["train/target_features"]
  batch = batch_of(a("input_ids"), mask, a("attention_mask"), features, target)
  module = Drafter(loaded.config)
  inside = np.zeros(target.shape[-1], bool)
  inside[loaded.vocabulary] = True

  def loss_of(params, mask):
    outs = losses.unroll(module, params, batch, STEPS, None, False)
    parts, hits = [], []
    for i, out in enumerate(outs):
      scores = losses.shift(target, 1 + i)
      here = losses.shift(mask, i)
      known = here * jnp.asarray(inside)[jnp.argmax(scores, -1)]
      scores = scores[..., loaded.vocabulary]
      logits = module.apply({"params": params}, out, method="logits")
      # the mean is over all rows, padding and masked ones included
      parts.append(jnp.mean(known * losses.soft_cross_entropy(scores, logits)))
      hit = jnp.argmax(logits, -1) == jnp.argmax(scores, -1)
      hits.append(jnp.sum(hit * known) / (here.sum() + 1e-6))
    total = sum(0.8**i * p for i, p in enumerate(parts))
    return total, (parts, hits, outs)

  run = gradients(loaded, ("embed_tokens",), loss_of)
  real = a("attention_mask") > 0
  for part, counted in (("train", mask), ("train_edge", edge)):
    want = facts[part]
    loss, (parts, hits, outs), grads = run(jnp.asarray(counted))
    for out, wanted in zip(outs, arrays["train/out_features"], strict=True):
      scale = np.abs(wanted[real]).max()
      assert np.abs(out[real] - wanted[real]).max() < 1e-4 * scale
    np.testing.assert_allclose(parts, want["plosses"], rtol=1e-4)
    np.testing.assert_allclose(hits, want["acces"], rtol=1e-4)
    assert loss == pytest.approx(want["loss"], rel=1e-4)
    assert total_norm(grads) == pytest.approx(want["grad_norm"], rel=1e-4)
    found = check_gradients(loaded, arrays, part, grads)
    assert part == "train_edge" or found == len(grads)
