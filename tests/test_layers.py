"""Layers against transformers, and attention against a dense softmax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax.checkpoints import hf_target
from eagle_jax.models import kv_cache, layers, masks
from eagle_jax.models.kv_cache import KV, Slots

# What `rope_parameters` says, beside the kind; original context 32 positions.
ROPES = {
  "default": {},
  "linear": {"factor": 4.0},
  "llama3": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
  },
  "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
  "yarn, all fields": {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "attention_factor": 0.75,
  },
}


def hf_config(rope: dict, kind: str):
  transformers = pytest.importorskip("transformers")
  return transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=2,
    num_hidden_layers=1,
    vocab_size=16,
    max_position_embeddings=128,
    rope_parameters={"rope_theta": 5000.0, "rope_type": kind} | rope,
  )


@pytest.mark.parametrize("name", ROPES)
def test_rope_matches_transformers(name):
  torch = pytest.importorskip("torch")
  from transformers.models.llama import modeling_llama

  theirs = hf_config(ROPES[name], name.split(",")[0])
  ours = hf_target.target_config(theirs.to_dict(), "float32")
  rotary = modeling_llama.LlamaRotaryEmbedding(theirs)
  freq, factor = layers.rope_frequencies(ours)
  np.testing.assert_allclose(freq, rotary.inv_freq.numpy(), rtol=1e-6)
  assert factor == pytest.approx(rotary.attention_scaling, rel=1e-6)

  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 5, 3, 32)).astype(np.float32)
  positions = rng.integers(0, 120, (2, 5))  # also past the original context
  cos, sin = rotary(torch.tensor(x), torch.tensor(positions))
  wanted, _ = modeling_llama.apply_rotary_pos_emb(
    torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2
  )
  got = layers.rotate(
    jnp.asarray(x), layers.rotary(jnp.asarray(positions), ours)
  )
  np.testing.assert_allclose(got, wanted.numpy(), atol=3e-5)


def test_rope_scalings_differ_from_each_other():
  """The parity above would not notice a scaling that both sides ignore."""
  found = {
    tuple(
      layers.rope_frequencies(
        hf_target.target_config(
          hf_config(rope, name.split(",")[0]).to_dict(), "float32"
        )
      )[0]
    )
    for name, rope in ROPES.items()
  }
  assert len(found) == len(ROPES)


def test_rope_is_relative():
  """Scores depend on distances alone, so a shift of all positions is free."""
  config = tiny.target_config()
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 4, 1, config.head_size))
  positions = jnp.array([[0, 3, 4, 9]])
  score = lambda shift: jnp.einsum(
    "BTNH,BSNH->BTS",
    layers.rotate(q, layers.rotary(positions + shift, config)),
    layers.rotate(k, layers.rotary(positions + shift, config)),
  )
  np.testing.assert_allclose(score(0), score(50), atol=1e-4)


def test_rms_norm_is_the_formula():
  rng = np.random.default_rng(0)
  x, scale = rng.standard_normal((3, 7, 16)), rng.standard_normal(16)
  # A large eps, so that leaving it out or moving it is seen.
  wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * scale
  got = layers.rms_norm(
    jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 0.5
  )
  np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_matches_transformers(dtype):
  """In bfloat16 the order of casts counts: the mean is taken in float32."""
  torch = pytest.importorskip("torch")
  from transformers.models.llama.modeling_llama import LlamaRMSNorm

  rng = np.random.default_rng(1)
  x = (rng.standard_normal((4, 64)) * 30).astype(np.float32)
  scale = rng.standard_normal(64).astype(np.float32)
  norm = LlamaRMSNorm(64, eps=1e-5).to(getattr(torch, dtype))
  norm.weight.data = torch.tensor(scale).to(getattr(torch, dtype))
  wanted = norm(torch.tensor(x).to(getattr(torch, dtype)))
  got = layers.rms_norm(jnp.asarray(x, dtype), jnp.asarray(scale), 1e-5)
  assert got.dtype == dtype
  np.testing.assert_allclose(
    np.asarray(got, np.float32),
    wanted.detach().float().numpy(),
    rtol=1e-5 if dtype == "float32" else 2**-7,
  )


def dense_attention(q, keys, values, visible):
  """One softmax over one list of keys, in float64, entry by entry.

  q [B, T, N, H], keys and values [B, K, S, H], visible [B, T, S].
  """
  B, T, N, H = q.shape
  group = N // keys.shape[1]
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(B, T, N):
    seen = np.flatnonzero(visible[b, t])
    k, v = keys[b, n // group, seen], values[b, n // group, seen]
    weights = np.exp(k.astype(np.float64) @ q[b, t, n] / np.sqrt(H))
    out[b, t, n] = weights / weights.sum() @ v
  return out


B, T, N, K, H, S = 2, 4, 4, 2, 8, 5
ancestors = np.array(
  [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool
)
# 3 earlier rows, seen by the 4 own ones differently in each batch row.
earlier_bits = np.random.default_rng(5).random((B, T, 3)) < 0.5
causal = np.tril(np.ones((T, T), bool))
itself = np.eye(T, dtype=bool)
lengths = np.array([3, 5])
documents = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
committed = np.arange(S)[None, None] < lengths[:, None, None]

# name -> Attend, number of earlier rows, of steps, dense mask of each block
BLOCKS = {
  "prefill": (masks.Attend(own=masks.Causal()), 0, 0, [causal]),
  "prefill in a cache": (
    masks.Attend(own=masks.Causal(), length=lengths),
    0,
    0,
    [committed, causal],
  ),
  "packed documents": (
    masks.Attend(own=masks.Causal(jnp.asarray(documents))),
    0,
    0,
    [causal & (documents[:, :, None] == documents[:, None])],
  ),
  "verify": (
    masks.Attend(
      own=masks.Tree(jnp.asarray(ancestors[None].repeat(B, 0))), length=lengths
    ),
    0,
    0,
    [committed, ancestors],
  ),
  "draft level": (
    masks.Attend(
      own=masks.Itself(),
      earlier=masks.Tree(jnp.asarray(earlier_bits)),
      length=lengths,
    ),
    3,
    0,
    [committed, earlier_bits, itself],
  ),
  "unrolled training": (
    masks.Attend(own=masks.Itself(), earlier=masks.Causal()),
    T,
    2,
    [causal, itself, itself, itself],
  ),
  "everything": (
    masks.Attend(
      own=masks.Causal(), earlier=masks.Causal(), length=lengths, window=3
    ),
    T,
    1,
    # Queries stand at 5..8; the window cuts by distance in every block but
    # the steps, which are the query's own row.
    [
      committed & (np.arange(5, 9)[:, None] - np.arange(S)[None] < 3),
      causal & ~np.tril(np.ones((T, T), bool), -3),
      itself,
      causal & ~np.tril(np.ones((T, T), bool), -3),
    ],
  ),
}


def rows(rng, X: int) -> KV:
  k, v = rng.standard_normal((2, B, K, X, H)).astype(np.float32)
  return KV(jnp.asarray(k), jnp.asarray(v))


def as_slots(made: KV) -> Slots:
  return kv_cache.of_rows((made,))[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_attention_over_blocks_is_one_dense_softmax(name):
  attend, X, R, drawn = BLOCKS[name]
  rng = np.random.default_rng(2)
  q = rng.standard_normal((B, T, N, H)).astype(np.float32) * 2
  prefix = rows(rng, S) if attend.length is not None else None
  earlier = rows(rng, X) if X else None
  steps = tuple(rows(rng, T) for _ in range(R))
  own = rows(rng, T)
  positions = jnp.broadcast_to(jnp.arange(5, 5 + T), (B, T))
  got = layers.attention(
    jnp.asarray(q),
    own,
    positions,
    attend,
    prefix and as_slots(prefix),
    earlier,
    steps,
  )
  blocks = [b for b in (prefix, earlier, *steps, own) if b is not None]
  visible = np.concatenate(
    [np.broadcast_to(d, (B, T, d.shape[-1])) for d in drawn], -1
  )
  wanted = dense_attention(
    q,
    np.concatenate([b.k for b in blocks], 2),
    np.concatenate([b.v for b in blocks], 2),
    visible,
  )
  np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("own", [masks.Causal(), masks.Itself()])
def test_empty_prefix_gives_no_nan_and_changes_nothing(own):
  """A row that has nothing committed sees itself, whatever its neighbour."""
  rng = np.random.default_rng(3)
  q = jnp.asarray(rng.standard_normal((B, T, N, H)), jnp.float32)
  made, prefix = rows(rng, T), rows(rng, S)
  positions = jnp.broadcast_to(jnp.arange(T), (B, T))
  got = layers.attention(
    q,
    made,
    positions,
    masks.Attend(own=own, length=jnp.array([0, 3])),
    as_slots(prefix),
    None,
    (),
  )
  alone = layers.attention(
    q, made, positions, masks.Attend(own=own), None, None, ()
  )
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got[0], alone[0], atol=1e-6)
  assert np.abs(got[1] - alone[1]).max() > 1e-2


def test_window_that_hides_the_whole_prefix_gives_no_nan():
  rng = np.random.default_rng(4)
  q = jnp.asarray(rng.standard_normal((B, 1, N, H)), jnp.float32)
  made, prefix = rows(rng, 1), rows(rng, S)
  attend = masks.Attend(own=masks.Itself(), length=jnp.array([5, 5]), window=1)
  got = layers.attention(
    q, made, jnp.full((B, 1), 5), attend, as_slots(prefix), None, ()
  )
  seen = np.asarray(made.v).repeat(N // K, 1).transpose(0, 2, 1, 3)
  np.testing.assert_allclose(got, seen, atol=1e-6)


def test_softmax_and_scores_are_float32():
  """Scores 256 and 256.5 are one and the same number in bfloat16.

  All inputs are exact in bfloat16; only a half-precision score (spacing 2
  at 256) would weigh both keys alike and give 0.5.
  """
  q = jnp.array([16, 1, 0, 0], jnp.bfloat16).reshape(1, 1, 1, 4)
  k = jnp.array([[32, 0, 0, 0], [32, 1, 0, 0]], jnp.bfloat16)
  v = jnp.array([[0.0] * 4, [1.0] * 4], jnp.bfloat16)
  prefix = as_slots(KV(k[None, None, :1], v[None, None, :1]))
  own = KV(k[None, None, 1:], v[None, None, 1:])
  attend = masks.Attend(own=masks.Causal(), length=jnp.array([1]))
  out = layers.attention(q, own, jnp.array([[1]]), attend, prefix, None, ())
  assert out.dtype == jnp.bfloat16
  sigmoid = 1 / (1 + np.exp(-0.5))
  np.testing.assert_allclose(np.asarray(out, np.float32), sigmoid, rtol=2**-7)


def test_head_scores_are_float32_in_half_precision():
  """Two logits 2^-10 apart at 4 differ in float32 and tie in bfloat16."""
  head = layers.Embed(2, 2, "bfloat16")
  table = jnp.array([[4.0, 0.0], [4.0, 2.0**-10]])
  scores = head.apply(
    {"params": {"embedding": table}},
    jnp.ones((1, 2), jnp.bfloat16),
    method="scores",
  )
  assert scores.dtype == jnp.float32
  assert scores[0, 1] - scores[0, 0] == 2.0**-10


def test_head_size_need_not_divide_the_width():
  config = tiny.target_config(head_size=16)  # 4 heads of 16 over D = 32
  assert config.num_heads * config.head_size != config.hidden_size
  x = jnp.ones((1, 3, config.hidden_size))
  positions = jnp.arange(3)[None]
  arguments = (
    positions,
    layers.rotary(positions, config),
    masks.Attend(own=masks.Causal()),
    None,
    None,
    (),
  )
  (out, made), _ = layers.Attention(config).init_with_output(
    jax.random.key(0), x, *arguments
  )
  assert out.shape == x.shape
  assert made.k.shape == made.v.shape == (1, 2, 3, 16)


@pytest.mark.parametrize(
  ("change", "word"),
  [({"num_kv_heads": 3}, "num_kv_heads"), ({"head_size": 7}, "head_size")],
)
def test_impossible_sizes_are_named(change, word):
  with pytest.raises(ValueError, match=word):
    dataclasses.replace(tiny.target_config(), **change)


def moe(**changes):
  """A mixture of 4 experts with random weights: config, parameters, module."""
  fields = {"num_experts": 4, "experts_per_token": 2}
  config = tiny.target_config(**fields | changes)
  module = layers.MoE(config)
  params = module.init(jax.random.key(0), jnp.zeros((1, 1, tiny.D)))["params"]
  return config, jax.tree.map(lambda a: a * 20, params), module


@pytest.mark.parametrize("norm", [True, False])
def test_experts_are_each_tokens_own_mlps(norm):
  """Against the twin that takes token by token and expert by expert."""
  _, params, module = moe(norm_expert_weights=norm)
  x = np.asarray(jax.random.normal(jax.random.key(1), (2, 7, tiny.D)))
  got = module.apply({"params": params}, jnp.asarray(x))
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  mlp = {k: v["kernel"] for k, v in p["experts"].items()}
  used = set()
  for b, t in np.ndindex(2, 7):
    chance = np.exp(x[b, t] @ p["router"]["kernel"])
    chance /= chance.sum()
    best = np.argsort(-chance)[:2]
    scale = chance[best].sum() if norm else 1.0
    want = 0.0
    for e in best:
      gate = x[b, t] @ mlp["gate_proj"][e]
      up = gate / (1 + np.exp(-gate)) * (x[b, t] @ mlp["up_proj"][e])
      want += chance[e] / scale * (up @ mlp["down_proj"][e])
    np.testing.assert_allclose(got[b, t], want, atol=1e-4)
    used |= set(best)
  assert used == {0, 1, 2, 3}


def test_equal_experts_are_one_dense_mlp():
  config, params, module = moe(norm_expert_weights=True)
  first = jax.tree.map(lambda a: a[0], params["experts"])
  equal = jax.tree.map(
    lambda a: jnp.broadcast_to(a[:1], a.shape), params["experts"]
  )
  x = jax.random.normal(jax.random.key(1), (2, 7, tiny.D))
  got = module.apply({"params": params | {"experts": equal}}, x)
  want = layers.MLP(config).apply({"params": first}, x)
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_tokens_beside_a_token_do_not_change_its_experts():
  """Dropless: all tokens may choose the same expert."""
  _, params, module = moe()
  x = jax.random.normal(jax.random.key(2), (1, 1, tiny.D))
  alone = module.apply({"params": params}, x)
  crowd = module.apply({"params": params}, jnp.repeat(x, 40, 1))
  np.testing.assert_allclose(crowd, np.repeat(alone, 40, 1), atol=1e-5)


@pytest.mark.parametrize(("E", "k"), [(4, 5), (4, 0), (0, 2)])
def test_numbers_of_experts_that_do_not_fit_are_refused(E, k):
  with pytest.raises(ValueError, match=f"experts_per_token {k}"):
    tiny.target_config(num_experts=E, experts_per_token=k)
