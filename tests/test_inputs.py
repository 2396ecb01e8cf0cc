"""The ablation inputs: the same in training, drafting and decoding."""

import dataclasses
import json
import types

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_losses
import tiny
from engines import unoptimised  # noqa: F401 (compiles fast)

from eagle_jax import loading
from eagle_jax.checkpoints import drafters
from eagle_jax.config import INPUTS
from eagle_jax.models.drafter import Drafter
from eagle_jax.speculation import decoding, tree
from eagle_jax.speculation import state as states
from eagle_jax.training import losses

CASES = [*((i, "eagle3") for i in INPUTS), ("token", "eagle")]


def with_inputs(target, inputs: str, kind: str = "eagle3"):
  loaded = tiny.drafter(target, kind, W=tiny.V)
  config = dataclasses.replace(loaded.config, inputs=inputs)
  return dataclasses.replace(loaded, config=config)


@pytest.mark.parametrize(("inputs", "kind"), CASES)
def test_training_steps_equal_grow_and_extend(inputs, kind):
  """Scores of a drafted chain are those of the unrolled training steps.

  The chain drafts its own tokens; training then reads just these:

    tokens       x_0 .. x_n | c_1 c_2 c_3       n = 8, root x_8
    step i, row n - 1, scores c_{i+1}
  """
  target = engines.target()
  loaded = with_inputs(target, inputs, kind)
  n, L = 8, 3
  m = loading.models(target, loaded, tree.chain(L))
  ids = np.zeros((1, 16), np.int32)
  ids[0, : n + 1] = engines.prompt(5, n + 1)
  module = Drafter(loaded.config)

  def features_of(tokens):
    packed = types.SimpleNamespace(
      tokens=tokens,
      mask=np.ones_like(tokens, bool),
      documents=np.ones_like(tokens),
      positions=np.arange(tokens.shape[1], dtype=np.int32)[None],
    )
    return test_losses.batch_of(target, loaded, packed)

  batch = features_of(ids)
  state = states.init_state(m, 1, 16, 16).replace(
    tokens=jnp.asarray(ids), finished=jnp.zeros(1, bool)
  )
  # in two pieces, as a prompt and an accepted run
  for start, stop in ((0, 4), (4, n)):
    cache, (feature, tokens, scores) = decoding.extend(
      m,
      state,
      batch.features[:, start:stop],
      state.tokens[:, start + 1 : stop + 1],
      jnp.array([stop - start - 1]),
      jnp.array([stop]),
    )
    state = state.replace(
      length=jnp.array([stop]),
      draft_cache=cache,
      root_feature=feature,
      child_tokens=tokens,
      child_scores=scores,
    )
  grown = decoding.grow(m, state)
  chain = np.asarray(grown.tokens[0, 1:])
  got = np.diff(np.asarray(grown.scores[0]))
  ids[0, n + 1 : n + 1 + L] = chain
  # the true features of rows before n do not depend on what was drafted
  batch = batch.replace(tokens=jnp.asarray(ids))
  outs = losses.unroll(module, loaded.params, batch, L, None, False)
  for i, out in enumerate(outs):
    logits = module.apply(
      {"params": loaded.params}, out[0, n - 1], method="logits"
    )
    assert loaded.vocabulary[int(jnp.argmax(logits))] == chain[i]
    np.testing.assert_allclose(
      jnp.max(jax.nn.log_softmax(logits)), got[i], atol=2e-5
    )


def test_what_each_input_depends_on():
  """Perturb one input at a time and see whether the output moves."""
  target = engines.target()
  packed = test_losses.pack(test_losses.documents([16]), 16)
  t = 6  # a row; f_t, x_t, x_{t+1}
  moves = {}
  for inputs in INPUTS:
    loaded = with_inputs(target, inputs)
    module = Drafter(loaded.config)
    batch = test_losses.batch_of(target, loaded, packed)
    run = lambda b, m=module, p=loaded.params: np.asarray(
      losses.unroll(m, p, b, 1, None, False)[0][0, t]
    )
    base = run(batch)
    other = lambda i, b=batch: b.replace(
      tokens=b.tokens.at[0, i].set((b.tokens[0, i] + 1) % tiny.V)
    )
    moves[inputs] = [
      bool(np.abs(run(b) - base).max() > 1e-4)
      for b in (
        batch.replace(features=batch.features.at[0, t].add(1.0)),
        other(t),
        other(t + 1),
      )
    ]
  # x_t is seen by the shifted drafters through row t - 1
  assert moves == {
    "feature+token": [True, True, True],
    "feature+unshifted": [True, True, False],
    "feature": [True, False, False],
    "token": [False, True, True],
  }


def test_saved_and_loaded_but_no_foreign_drafter(tmp_path):
  target = engines.target()
  made = with_inputs(target, "token")
  drafters.save(
    tmp_path, made.config, made.params, made.vocabulary, False, {}, "float32"
  )
  again = drafters.load(tmp_path, target.config, target.params)
  assert again.config == made.config
  raw = json.loads((tmp_path / "config.json").read_text())
  assert raw["architectures"] == [drafters.ABLATION]


def test_unknown_inputs_are_refused():
  config = tiny.drafter(engines.target()).config
  with pytest.raises(ValueError, match="inputs 'both' are unknown: use one of"):
    dataclasses.replace(config, inputs="both")
