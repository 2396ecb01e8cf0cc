"""The target against transformers, the golden vectors, and itself in pieces."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import record_targets
import tiny

from eagle_jax.checkpoints import hf_target
from eagle_jax.models import kv_cache, layers, masks
from eagle_jax.models.target import Target, cpu_layout

CASES = (
  "eagle2_llama",
  "eagle2_llama_bin",
  "eagle2_qwen2",
  "eagle3_llama",
  "eagle3_qwen3",
)

COMMON = {
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "num_hidden_layers": 3,
  "vocab_size": 64,
  "max_position_embeddings": 64,
  "initializer_range": 0.2,
  "tie_word_embeddings": False,
}


def rope(kind: str, **fields) -> dict:
  return {"rope_parameters": {"rope_theta": 1000.0, "rope_type": kind} | fields}


# name -> config class, its fields, and what of ours must matter: undoing it
# has to spoil the logits, else the parity would prove nothing about it.
FAMILIES = {
  "llama": ("LlamaConfig", {}, {"norm_eps": 1.0}),
  "llama, tied head": (
    "LlamaConfig",
    {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"rope_theta": 100.0},
  ),
  "llama, llama3 rope": (
    "LlamaConfig",
    rope(
      "llama3",
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=16,
    ),
    {"rope_scaling": None},
  ),
  "llama, linear rope": (
    "LlamaConfig",
    rope("linear", factor=4.0),
    {"rope_scaling": None},
  ),
  "llama, yarn rope": (
    "LlamaConfig",
    rope("yarn", factor=4.0, original_max_position_embeddings=16),
    {"rope_scaling": None},
  ),
  "mistral, window": (
    "MistralConfig",
    {"sliding_window": 5},
    {"sliding_window": None},
  ),
  "qwen2, biases": ("Qwen2Config", {}, None),
  "qwen2, tied head, window in all layers": (
    "Qwen2Config",
    {
      "tie_word_embeddings": True,
      "use_sliding_window": True,
      "sliding_window": 5,
      "max_window_layers": 0,
    },
    {"sliding_window": None},
  ),
  "qwen3, q/k norm, wide heads": (
    "Qwen3Config",
    {"head_dim": 16},
    {"norm_eps": 1.0},
  ),
  "mixtral": (
    "MixtralConfig",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    {"experts_per_token": 1},
  ),
  "qwen3 moe": (
    "Qwen3MoeConfig",
    {
      "num_experts": 5,
      "num_experts_per_tok": 3,
      "moe_intermediate_size": 24,
      "norm_topk_prob": True,
      "head_dim": 8,
    },
    {"norm_expert_weights": False},
  ),
  "qwen3 moe, raw weights": (
    "Qwen3MoeConfig",
    {
      "num_experts": 3,
      "num_experts_per_tok": 2,
      "moe_intermediate_size": 16,
      "head_dim": 8,
    },
    {"norm_expert_weights": True},
  ),
  "qwen3, tied head": (
    "Qwen3Config",
    {"head_dim": 8, "tie_word_embeddings": True},
    None,
  ),
}


def everything(config, params, ids, taps=()):
  """Logits and outputs of one causal pass over ids [B, T]."""
  ids = jnp.asarray(ids, jnp.int32)
  model = Target(config, taps)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  attend = masks.Attend(own=masks.Causal())
  out, _ = model.apply({"params": params}, ids, positions, attend, None)
  return logits(model, params, out.feature), out


def logits(model, params, feature):
  return model.apply({"params": params}, feature, method="logits")


def relative(got, wanted) -> float:
  """The largest error, in units of the largest wanted value."""
  got, wanted = np.asarray(got), np.asarray(wanted)
  assert got.shape == wanted.shape
  return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_matches_transformers(name, tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  kind, fields, undo = FAMILIES[name]
  config = getattr(transformers, kind)(**COMMON | fields)
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim == 1:  # norms start at 1 and biases at 0: no test
        parameter += 0.3 * torch.randn_like(parameter)
  model.save_pretrained(tmp_path)

  ids = np.random.default_rng(1).integers(0, 64, (2, 24))
  with torch.no_grad():
    theirs = model.eval()(torch.tensor(ids), output_hidden_states=True)
  ours, params = hf_target.load(tmp_path, "float32")
  L = ours.num_layers
  got, out = everything(ours, params, ids, tuple(range(L)))
  wanted = theirs.logits.numpy()
  assert np.abs(wanted).max() > 0.5
  assert np.abs(got - wanted).max() < 1e-4
  # hidden_states: the input of each layer, then the final norm's output.
  states = [h.numpy() for h in theirs.hidden_states]
  assert np.abs(out.feature - states[L]).max() < 1e-4
  assert np.abs(out.taps - np.concatenate(states[:L], -1)).max() < 1e-4
  if undo:
    wrong, _ = everything(dataclasses.replace(ours, **undo), params, ids)
    assert np.abs(wrong - wanted).max() > 1e-2


def test_config_of_older_transformers_reads_alike():
  """`rope_theta` and `rope_scaling` beside each other, kind named `type`."""
  base = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    **{k: v for k, v in COMMON.items() if k != "initializer_range"},
  }
  fields = {"factor": 4.0, "original_max_position_embeddings": 16}
  new = base | rope("yarn", **fields)
  old = base | {
    "rope_theta": 1000.0,
    "rope_scaling": {"type": "yarn"} | fields,
  }
  config = hf_target.target_config(new, "float32")
  assert config.rope_scaling.kind == "yarn"
  assert hf_target.target_config(old, "float32") == config


@pytest.mark.parametrize("case", CASES)
def test_golden_logits_and_features(golden, case):
  data = golden(case)
  arrays = data.arrays
  config, params = hf_target.load(data.folder / "target", "float32")
  taps = (2, 4, 5) if "eagle3" in case else ()
  got, out = everything(config, params, arrays["target/input_ids"], taps)
  assert relative(got, arrays["target/logits"]) < 1e-4
  assert relative(out.feature, arrays["target/last_hidden"]) < 1e-4
  features = out.taps if taps else out.feature
  assert relative(features, arrays["target/features"]) < 1e-4


@pytest.mark.parametrize("case", ["eagle2_llama", "eagle3_qwen3"])
def test_golden_taps_are_inputs_of_layers(golden, case):
  """Every layer's input, and past the last layer the raw residual."""
  data = golden(case)
  config, params = hf_target.load(data.folder / "target", "float32")
  L = config.num_layers
  ids = data.arrays["target/input_ids"]
  _, out = everything(config, params, ids, tuple(range(L + 1)))
  got = jnp.split(out.taps[0], L + 1, axis=-1)
  states = data.arrays["target/hf_hidden_states"]
  for i in range(L):
    assert relative(got[i], states[i]) < 1e-4
  raw = data.arrays["target/last_hidden_prenorm"][0]
  assert relative(got[L], raw) < 1e-4


def test_no_taps_have_width_zero():
  target = tiny.target(num_layers=1)
  _, out = everything(target.config, target.params, [[1, 2, 3]])
  assert out.taps.shape == (1, 3, 0)


@pytest.mark.parametrize("window", [None, 4])
def test_pieces_through_the_cache_equal_one_pass(window):
  """Rows of one batch stand at different lengths, as in generation."""
  target = tiny.target(num_layers=3, sliding_window=window)
  config, params = target.config, target.params
  model = Target(config)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, tiny.V, (2, 16))
  whole, _ = everything(config, params, ids)
  cache = kv_cache.init(
    2, config.num_layers, config.num_kv_heads, 16, config.head_size, "float32"
  )
  got = [[], []]
  lengths = np.array([0, 0])
  # (rows read, of which the first batch row and the second keep so many)
  for T, kept in ((6, (6, 4)), (1, (1, 1)), (5, (3, 5)), (4, (4, 4))):
    index = lengths[:, None] + np.arange(T)
    out, rows = model.apply(
      {"params": params},
      jnp.asarray(np.take_along_axis(ids, index, 1)),
      jnp.asarray(index),
      masks.Attend(own=masks.Causal(), length=jnp.asarray(lengths)),
      cache,
    )
    scores = logits(model, params, out.feature)
    cache = kv_cache.commit(cache, rows, jnp.asarray(lengths))
    for b in range(2):
      got[b] += list(np.asarray(scores[b, : kept[b]]))
    lengths += np.array(kept)
  assert lengths.tolist() == [14, 14]
  for b in range(2):
    np.testing.assert_allclose(np.stack(got[b]), whole[b, :14], atol=2e-5)


def test_tree_nodes_equal_their_paths():
  """A verify pass is all root-to-node paths at once.

  root 0 - 1 - 3        nodes 1 and 2 stand at one position
       `-- 2
  """
  target = tiny.target(num_layers=3)
  config, params = target.config, target.params
  model = Target(config)
  prompt, nodes = [5, 9, 11], [7, 20, 21, 3]
  paths = ([0], [0, 1], [0, 2], [0, 1, 3])
  bits = np.zeros((1, 4, 4), bool)
  for path in paths:
    bits[0, path[-1], path] = True
  _, rows = model.apply(
    {"params": params},
    jnp.array([prompt]),
    jnp.arange(3)[None],
    masks.Attend(own=masks.Causal()),
    None,
  )
  cache = kv_cache.resize(kv_cache.of_rows(rows), 8)
  out, _ = model.apply(
    {"params": params},
    jnp.array([nodes]),
    jnp.array([[3, 4, 4, 5]]),
    masks.Attend(own=masks.Tree(jnp.asarray(bits)), length=jnp.array([3])),
    cache,
  )
  for path in paths:
    tokens = prompt + [nodes[i] for i in path]
    _, alone = everything(config, params, [tokens])
    np.testing.assert_allclose(
      out.feature[0, path[-1]], alone.feature[0, -1], atol=2e-5
    )


def test_packed_documents_equal_each_alone():
  target = tiny.target(num_layers=3)
  a, b = [3, 1, 4, 1], [5, 9, 2]
  out, _ = Target(target.config).apply(
    {"params": target.params},
    jnp.array([a + b]),
    jnp.array([[0, 1, 2, 3, 0, 1, 2]]),
    masks.Attend(own=masks.Causal(jnp.array([[0] * 4 + [1] * 3]))),
    None,
  )
  for part, rows in ((a, slice(0, 4)), (b, slice(4, 7))):
    _, alone = everything(target.config, target.params, [part])
    np.testing.assert_allclose(
      out.feature[0, rows], alone.feature[0], atol=2e-5
    )


@pytest.mark.parametrize(
  "switches", [{}, {"qkv_bias": True}, {"qk_norm": True}]
)
def test_layers_laid_out_for_a_cpu_make_the_same_features(switches):
  t = tiny.target(num_layers=2, **switches)
  params = jax.tree.map(  # biases and norms that matter
    lambda a: a + 0.3 * jax.random.normal(jax.random.key(1), a.shape), t.params
  )
  ids = jax.random.randint(jax.random.key(2), (2, 5), 0, tiny.V)
  _, whole = everything(t.config, params, ids, (1,))
  model = Target(t.config, (1,), on_cpu=True)
  positions = jnp.broadcast_to(jnp.arange(5), ids.shape)
  laid_out = cpu_layout(params, t.config)
  assert set(laid_out["layers_1"]["self_attn"]) & {"q_proj", "qkv_proj"} == {
    "qkv_proj"
  }
  attend = masks.Attend(own=masks.Causal())
  out, _ = model.apply({"params": laid_out}, ids, positions, attend, None)
  for a, b in ((out.feature, whole.feature), (out.taps, whole.taps)):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_blocks_gives_the_same_scores(tied, monkeypatch):
  """Blocks 24 | 24 | 16 of 64 ids, read by 2 to 24 rows and by no others."""
  monkeypatch.setattr(layers, "HEAD_BLOCK", 24)
  t = tiny.target(tied_head=tied)
  assert t.config.vocab_size == 64
  params = cpu_layout(t.params, t.config)
  shapes = [b["kernel"].shape for b in params["head_blocks"].values()]
  assert shapes == [(t.config.hidden_size, n) for n in (24, 24, 16)]
  marked = jax.tree.map(lambda a: a + 1, params["head_blocks"])
  for rows in (1, 2, 24, 25):
    x = jax.random.normal(jax.random.key(rows), (rows, t.config.hidden_size))
    whole = logits(Target(t.config), t.params, x)
    blocked = Target(t.config, on_cpu=True)
    got = logits(blocked, params, x)
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-5)
    other = logits(blocked, params | {"head_blocks": marked}, x)
    reads_blocks = bool(jnp.any(jnp.abs(other - whole) > 0.1))
    assert reads_blocks == (rows in (2, 24))


def test_no_row_depends_on_a_later_token():
  """By gradients (as nanodo shows it): d feature[t] / d embedding[s > t]."""
  target = tiny.target(num_layers=2)
  ids = jnp.arange(6)[None]  # six different tokens, so rows = positions

  def feature(table):
    params = target.params | {"embed_tokens": {"embedding": table}}
    return everything(target.config, params, ids)[1].feature[0].sum(-1)

  table = target.params["embed_tokens"]["embedding"]
  slopes = np.abs(jax.jacrev(feature)(table)[:, :6]).sum(-1)
  np.testing.assert_array_equal(slopes > 0, np.tril(np.ones((6, 6), bool)))


def test_half_precision_stays_close_and_scores_in_float32():
  exact = tiny.target(num_layers=2)
  config = dataclasses.replace(exact.config, dtype="bfloat16")
  params = jax.tree.map(lambda a: a.astype("bfloat16"), exact.params)
  ids = np.random.default_rng(2).integers(0, tiny.V, (1, 12))
  wanted, _ = everything(exact.config, exact.params, ids)
  got, out = everything(config, params, ids)
  assert out.feature.dtype == jnp.bfloat16
  assert got.dtype == jnp.float32
  error = relative(got, wanted)
  assert 1e-6 < error < 0.05  # not float32 in disguise, and not noise


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_logits(name):
  """Parity without torch: what transformers gave for tiny targets on disk."""
  folder = record_targets.GOLDENS / record_targets.slug(name)
  config, params = hf_target.load(folder, "float32")
  ids = jnp.asarray(record_targets.IDS)
  network = Target(config)
  out, _ = network.apply(
    {"params": params},
    ids,
    jnp.arange(ids.shape[1])[None],
    masks.Attend(own=masks.Causal()),
    None,
  )
  logits = network.apply({"params": params}, out.feature, method="logits")
  want = np.load(folder / "expected.npy")
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(logits, want, atol=1e-4)
