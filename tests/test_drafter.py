"""Drafters against what the original code computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax.checkpoints import drafters, hf_target, tensors
from eagle_jax.models import kv_cache, masks
from eagle_jax.models.drafter import Drafter, cpu_layout

EAGLE = ("eagle2_llama", "eagle2_llama_bin", "eagle2_qwen2")
EAGLE3 = ("eagle3_llama", "eagle3_qwen3")


def relative(got, wanted) -> float:
  """The largest error, in units of the largest wanted value."""
  got, wanted = np.asarray(got), np.asarray(wanted)
  assert got.shape == wanted.shape
  return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def load(golden, case):
  if case.endswith("_bin"):
    pytest.importorskip("torch")
  data = golden(case)
  target, params = hf_target.load(data.folder / "target", "float32")
  loaded = drafters.load(data.folder / "drafter", target, params)
  return loaded, data.arrays


def method(loaded, name, *args):
  return Drafter(loaded.config).apply(
    {"params": loaded.params}, *args, method=name
  )


def forward(loaded, tokens, features, start=0, prefix=None):
  """One pass over T pairs at positions start.. behind `prefix`."""
  tokens = jnp.asarray(tokens, jnp.int32)
  positions = start + jnp.arange(tokens.shape[1])[None]
  length = None if prefix is None else jnp.array([start])
  attend = masks.Attend(own=masks.Causal(), length=length)
  return method(
    loaded,
    "__call__",
    tokens,
    jnp.asarray(features),
    positions,
    attend,
    prefix,
    None,
    (),
  )


@pytest.mark.parametrize("case", EAGLE + EAGLE3)
def test_golden_outputs(golden, case):
  loaded, arrays = load(golden, case)
  assert loaded.config.kind == ("eagle3" if case in EAGLE3 else "eagle")
  fused = method(loaded, "fuse", jnp.asarray(arrays["drafter/in_features"]))
  out, rows = forward(loaded, arrays["drafter/in_ids"], fused)
  assert relative(out, arrays["drafter/out_features"]) < 1e-4
  assert relative(rows.k, arrays["drafter/key_cache"]) < 1e-4
  assert relative(rows.v, arrays["drafter/value_cache"]) < 1e-4
  scores = method(loaded, "logits", out)
  assert scores.shape[-1] == loaded.config.draft_vocab_size
  assert relative(scores, arrays["drafter/logits"]) < 1e-4


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
  "switches", [{}, {"qkv_bias": True}, {"qk_norm": True}]
)
def test_a_drafter_laid_out_for_a_cpu_makes_the_same_outputs(kind, switches):
  d = tiny.drafter(tiny.target(), kind, **switches)
  params = jax.tree.map(  # biases and norms that matter
    lambda a: a + 0.3 * jax.random.normal(jax.random.key(1), a.shape), d.params
  )
  ids = jax.random.randint(jax.random.key(2), (2, 5), 0, tiny.V)
  features = jax.random.normal(
    jax.random.key(3), (*ids.shape, d.config.read_size)
  )
  positions = jnp.broadcast_to(jnp.arange(5), ids.shape)
  scores = [
    model.apply({"params": p}, ids, features, positions, method="everything")
    for model, p in (
      (Drafter(d.config), params),
      (Drafter(d.config, on_cpu=True), cpu_layout(params)),
    )
  ]
  np.testing.assert_allclose(*scores, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("window", [None, 4])
def test_wanted_rows_are_what_all_rows_are_there(kind, window):
  """Two batch rows want different ones, behind different prefixes."""
  d = tiny.drafter(tiny.target(), kind, sliding_window=window)
  rng = np.random.default_rng(0)
  B, T, S = 2, 6, 8
  tokens = jnp.asarray(rng.integers(0, tiny.V, (B, S + T)), jnp.int32)
  features = jnp.asarray(
    rng.normal(size=(B, S + T, d.config.hidden_size)), jnp.float32
  )
  length = jnp.array([5, 8])
  _, before = method(
    d,
    "__call__",
    tokens[:, :S],
    features[:, :S],
    jnp.broadcast_to(jnp.arange(S), (B, S)),
    masks.Attend(own=masks.Causal()),
    None,
    None,
    (),
  )
  prefix = kv_cache.of_rows((before,))[0]
  rest = (
    tokens[:, S:],
    features[:, S:],
    length[:, None] + jnp.arange(T),
    masks.Attend(own=masks.Causal(), length=length),
    prefix,
    None,
    (),
  )
  out, rows = method(d, "__call__", *rest)
  wanted = jnp.array([[0, 4, 2], [5, 1, 1]])
  some, same_rows = method(d, "__call__", *rest, wanted)
  picked = jnp.take_along_axis(out, wanted[..., None], axis=1)
  np.testing.assert_allclose(some, picked, atol=2e-5)
  jax.tree.map(np.testing.assert_array_equal, rows, same_rows)


@pytest.mark.parametrize("case", EAGLE3)
def test_golden_eagle3_parts(golden, case):
  """The fusion, the head's norm, and the output fed back before that norm."""
  loaded, arrays = load(golden, case)
  ids = arrays["drafter/in_ids"]
  fused = method(loaded, "fuse", jnp.asarray(arrays["drafter/in_features"]))
  assert relative(fused, arrays["drafter/fc_out"]) < 1e-4
  out, _ = forward(loaded, ids, fused)
  normed = method(loaded, "feature", out)
  assert relative(normed, arrays["drafter/out_features_normed"]) < 1e-4
  again, _ = forward(loaded, ids, out)
  wanted = arrays["drafter/fed_back_out_features"]
  assert relative(again, wanted) < 1e-4
  wrong, _ = forward(loaded, ids, normed)
  assert relative(wrong, wanted) > 1e-2


@pytest.mark.parametrize("case", EAGLE)
def test_eagle_fuses_and_norms_nothing(golden, case):
  loaded, arrays = load(golden, case)
  features = jnp.asarray(arrays["drafter/in_features"])
  assert method(loaded, "fuse", features) is features
  assert method(loaded, "feature", features) is features


@pytest.mark.parametrize("case", EAGLE3)
def test_golden_draft_ids_are_target_ids(golden, case):
  """d2t holds offsets: the first ten children, as ids of both vocabularies."""
  loaded, arrays = load(golden, case)
  step = "draft/t60/step0/"
  ours = loaded.vocabulary[arrays[step + "level0/topk_index"][0]]
  np.testing.assert_array_equal(ours, arrays[step + "tokens_flat"][:10])


@pytest.mark.parametrize("case", ["eagle2_llama", "eagle3_llama"])
def test_golden_drafter_in_pieces(golden, case):
  """Reading newly accepted pairs behind a cache equals reading all at once."""
  loaded, arrays = load(golden, case)
  c = loaded.config
  ids = arrays["drafter/in_ids"]
  fused = method(loaded, "fuse", jnp.asarray(arrays["drafter/in_features"]))
  cache = kv_cache.init(
    1, 1, c.num_kv_heads, ids.shape[1] + 2, c.head_size, "float32"
  )
  got, start = [], 0
  for stop in (6, 7, 11, ids.shape[1]):
    out, rows = forward(
      loaded, ids[:, start:stop], fused[:, start:stop], start, cache[0]
    )
    cache = kv_cache.commit(cache, (rows,), jnp.array([start]))
    got.append(out)
    start = stop
  out = jnp.concatenate(got, 1)
  assert relative(out, arrays["drafter/out_features"]) < 1e-4


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_positions_past_the_limit_still_work(kind):
  """Official drafters name a shorter context than their target's: rotary
  positions go on, and only distances count."""
  target = tiny.target(num_layers=8)
  loaded = tiny.drafter(target, kind, W=48)
  loaded = dataclasses.replace(
    loaded, config=dataclasses.replace(loaded.config, max_positions=8)
  )
  features = jax.random.normal(jax.random.key(0), (1, 5, tiny.D))
  here, _ = forward(loaded, [[1, 2, 3, 4, 5]], features)
  far, _ = forward(loaded, [[1, 2, 3, 4, 5]], features, start=500)
  np.testing.assert_allclose(far, here, atol=1e-3)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_window_of_a_drafter_is_used(kind):
  """With a window of 1 each row sees itself alone, like a row by itself."""
  target = tiny.target(num_layers=8)
  loaded = tiny.drafter(target, kind, W=48)
  narrow = dataclasses.replace(
    loaded, config=dataclasses.replace(loaded.config, sliding_window=1)
  )
  features = jax.random.normal(jax.random.key(1), (1, 4, tiny.D))
  tokens = jnp.array([[9, 8, 7, 6]])
  wide, _ = forward(loaded, tokens, features)
  out, _ = forward(narrow, tokens, features)
  for t in range(4):
    alone, _ = forward(
      loaded, tokens[:, t : t + 1], features[:, t : t + 1], start=t
    )
    np.testing.assert_allclose(out[0, t], alone[0, 0], atol=1e-5)
  assert np.abs(out - wide)[0, 3].max() > 1e-3


def test_reduced_eagle_head_is_the_cut_target_head():
  """Draft id i scores what the target's head gives for vocabulary[i]."""
  target = tiny.target(num_layers=8)
  loaded = tiny.drafter(target, "eagle", W=20)
  x = jax.random.normal(jax.random.key(2), (1, 3, tiny.D))
  table = np.asarray(target.params["embed_tokens"]["embedding"])
  np.testing.assert_allclose(
    method(loaded, "logits", x),
    (np.asarray(x) @ table.T)[..., loaded.vocabulary],
    atol=1e-4,
  )


def one_row(c, params, token, feature):
  """Twin of one pass over one pair, in float64: a lone row's attention is its
  own value, so rotary embedding and softmax drop out."""
  p = {k: np.asarray(v, np.float64) for k, v in tensors.flatten(params).items()}

  def norm(x, name):
    return x / np.sqrt(np.mean(x * x) + c.norm_eps) * p[name + "/scale"]

  def dense(x, name):
    return x @ p[name + "/kernel"] + p.get(name + "/bias", 0.0)

  taps = np.split(feature, len(c.taps))
  if c.fc_norm:
    taps = [norm(x, f"fc_norm_{i}") for i, x in enumerate(taps)]
  g = np.concatenate(taps)
  g = dense(norm(g, "input_norm") if c.norm_before_fc else g, "fc")
  normed = norm(g, "hidden_norm")
  emb = norm(p["embed_tokens/embedding"][token], "input_layernorm")
  value = dense(np.concatenate([emb, normed]), "self_attn/v_proj")
  value = value.reshape(c.num_kv_heads, 1, c.head_size)
  value = np.repeat(value, c.num_heads // c.num_kv_heads, 1).reshape(-1)
  x = normed if c.norm_before_residual else g
  x = x + dense(value, "self_attn/o_proj")
  h = norm(x, "post_attention_layernorm")
  gate = dense(h, "mlp/gate_proj")
  up = gate / (1 + np.exp(-gate)) * dense(h, "mlp/up_proj")
  x = x + dense(up, "mlp/down_proj")
  return norm(x, "norm") if c.norm_output else x, dense(
    norm(x, "norm"), "lm_head"
  )


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_every_switch_is_what_its_name_says(variant):
  """Against the twin; and undoing any one switch spoils it."""
  target = tiny.target(num_layers=2)
  loaded = tiny.drafter(target, taps=(0, 1, 2), **tiny.VARIANTS[variant])
  c = loaded.config
  feature = np.random.default_rng(5).normal(size=c.read_size) * 3
  fed, scores = one_row(c, loaded.params, 7, feature)

  def ours(config):
    changed = dataclasses.replace(loaded, config=config)
    fused = method(changed, "fuse", jnp.asarray(feature, jnp.float32))
    out, _ = forward(changed, [[7]], fused[None, None])
    return out[0, 0], method(changed, "logits", out)[0, 0]

  got = ours(c)
  np.testing.assert_allclose(got[0], fed, atol=1e-4)
  np.testing.assert_allclose(got[1], scores, atol=1e-4)
  for name, value in tiny.VARIANTS[variant].items():
    if value is True and name != "own_embedding":
      other = ours(dataclasses.replace(c, **{name: False}))
      assert np.abs(other[0] - fed).max() > 1e-2, name


@pytest.mark.parametrize(
  ("kind", "changes", "words"),
  [
    ("eagle", {"fc_norm": True}, "fc_norm are variants of kind 'eagle3'"),
    (
      "eagle",
      {"norm_output": True},
      "norm_output are variants of kind 'eagle3'",
    ),
    ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "exclude each"),
    ("eagle3", {"target_hidden_size": 48}, "its own embedding"),
  ],
)
def test_switches_that_do_not_fit_are_refused(kind, changes, words):
  taps = {"taps": (0, 1, 2)} if kind == "eagle3" else {}
  config = tiny.drafter(tiny.target(num_layers=2), kind, **taps).config
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(config, **changes)
