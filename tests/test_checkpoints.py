"""Folders in and out: exact round trips, and one line for every bad one."""

import dataclasses
import json
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from refusals import refused
from safetensors.numpy import load_file, save_file

from eagle_jax import loading
from eagle_jax.checkpoints import drafters, hf_target, tensors
from eagle_jax.training import start


def target_weights(target) -> dict[str, np.ndarray]:
  """A target's parameters by their Hugging Face names."""
  weights = {}
  for path, leaf in tensors.flatten(target.params).items():
    *parts, kind = path.replace("layers_", "layers.").split("/")
    name = ".".join(parts) + (".bias" if kind == "bias" else ".weight")
    array = np.asarray(leaf).T if kind == "kernel" else np.asarray(leaf)
    head = name == "lm_head.weight"
    weights[name if head else "model." + name] = np.ascontiguousarray(array)
  return weights


def target_json(target, **changes) -> dict:
  c = target.config
  return {
    "model_type": c.family,
    "vocab_size": c.vocab_size,
    "hidden_size": c.hidden_size,
    "intermediate_size": c.mlp_size,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_kv_heads,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": c.rope_theta,
    "max_position_embeddings": c.max_positions,
    "tie_word_embeddings": c.tied_head,
  } | changes


def write(folder, weights, raw):
  folder.mkdir(exist_ok=True)
  save_file(weights, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(raw))
  return folder


def change(folder, edit):
  """Let `edit` change a drafter folder's weights and config in place."""
  weights = load_file(folder / "model.safetensors")
  raw = json.loads((folder / "config.json").read_text())
  edit(weights, raw)
  return write(folder, weights, raw)


def same(a: dict, b: dict):
  """Bit equality of two parameter trees."""
  a, b = tensors.flatten(a), tensors.flatten(b)
  assert a.keys() == b.keys()
  for path in a:
    assert a[path].dtype == b[path].dtype
    np.testing.assert_array_equal(a[path], b[path], err_msg=path)


@pytest.fixture(scope="module")
def small():
  """Seven layers are the fewest whose three taps all differ."""
  return tiny.target(num_layers=7, tied_head=False)


@pytest.fixture(scope="module")
def two():
  return tiny.target(num_layers=2, tied_head=False)


def drafter(target, kind="eagle3", W=48, **changes):
  """A drafter whose every leaf is random, its own head included."""
  loaded = tiny.drafter(target, kind, W)
  config = dataclasses.replace(loaded.config, **changes)
  W = config.draft_vocab_size
  if W == tiny.V:
    loaded = dataclasses.replace(
      loaded, vocabulary=np.arange(W, dtype=np.int32)
    )
  params = start.random(config, 0)
  rng = np.random.default_rng(3)
  params = jax.tree.map(
    lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32), params
  )
  if not config.own_embedding:
    params["embed_tokens"] = target.params["embed_tokens"]
  return dataclasses.replace(loaded, config=config, params=params)


def saved(folder, loaded, own_head=True, notes=None, dtype="float32"):
  drafters.save(
    folder,
    loaded.config,
    loaded.params,
    loaded.vocabulary,
    own_head,
    notes or {},
    dtype,
  )
  return folder


def load(folder, target):
  return drafters.load(folder, target.config, target.params)


# --- drafters: round trips ---


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("W", [48, tiny.V])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafter_round_trip_is_bit_equal(kind, W, own_head, small, tmp_path):
  made = drafter(small, kind, W, draft_noise=0.25)
  notes = {"chat_template": "{{ x }}\n", "steps": 7}
  back = load(saved(tmp_path, made, own_head, notes), small)
  assert back.config == made.config
  np.testing.assert_array_equal(back.vocabulary, made.vocabulary)
  assert notes.items() <= back.notes.items()
  wanted = made.params
  if not own_head:  # the rows of the target's head that the ids name
    head = small.params["lm_head"]["kernel"]
    wanted = wanted | {"lm_head": {"kernel": head[:, made.vocabulary]}}
  same(back.params, wanted)
  embedding = small.params["embed_tokens"]["embedding"]
  assert back.params["embed_tokens"]["embedding"] is embedding
  # The frozen embedding is not stored; the ids are, where they are needed.
  names = load_file(tmp_path / "model.safetensors")
  assert "embed_tokens.weight" not in names
  assert ("d2t" in names) == ("t2d" in names) == (tiny.V != W)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_biases_go_round_too(kind, small, tmp_path):
  made = drafter(small, kind, fc_bias=True, qkv_bias=True)
  back = load(saved(tmp_path, made), small)
  assert back.config == made.config
  same(back.params, made.params)


def test_saved_names_are_the_official_ones(golden, small, tmp_path):
  """The same set of names as in files that the original code reads."""
  for kind, case in (("eagle3", "eagle3_llama"), ("eagle", "eagle2_qwen2")):
    bias = kind == "eagle"  # as in that golden file
    made = drafter(small, kind, 48 if kind == "eagle3" else tiny.V)
    made = drafter(
      small, kind, len(made.vocabulary), fc_bias=bias, qkv_bias=bias
    )
    folder = saved(tmp_path / kind, made, own_head=kind == "eagle3")
    ours = load_file(folder / "model.safetensors")
    official = load_file(golden(case).folder / "drafter/model.safetensors")
    assert ours.keys() == official.keys()
    for name in set(ours) & {"d2t", "t2d"}:
      assert ours[name].dtype == official[name].dtype


def test_saved_d2t_holds_offsets(small, tmp_path):
  made = drafter(small)
  names = load_file(saved(tmp_path, made) / "model.safetensors")
  for i, target_id in enumerate(made.vocabulary):
    assert i + names["d2t"][i] == target_id
    assert names["t2d"][target_id]
  assert names["t2d"].sum() == len(made.vocabulary)


def test_half_precision_files_load_exactly(small, tmp_path):
  """Stored bfloat16, computed in float32: the rounded values, no others."""
  made = drafter(small)
  back = load(saved(tmp_path, made, dtype="bfloat16"), small)
  rounded = jax.tree.map(
    lambda a: a.astype("bfloat16").astype("float32"), made.params
  )
  same(back.params, rounded | {"embed_tokens": made.params["embed_tokens"]})


# --- drafters: what the file says counts ---


@pytest.mark.parametrize("present", [True, False])
def test_fc_bias_is_told_by_its_presence(present, small, tmp_path):
  """Official configs say `bias` wrongly or not at all."""
  made = drafter(small, "eagle", fc_bias=present)
  folder = saved(tmp_path, made)
  change(folder, lambda weights, raw: raw.update(bias=not present))
  assert load(folder, small).config.fc_bias == present


def test_stored_embedding_is_read(small, tmp_path):
  folder = saved(tmp_path, drafter(small))
  table = np.full((tiny.V, tiny.D), 2.0, np.float32)
  change(folder, lambda w, raw: w.update({"embed_tokens.weight": table}))
  back = load(folder, small)
  np.testing.assert_array_equal(back.params["embed_tokens"]["embedding"], table)


def test_zero_or_absent_d2t_is_identity_over_the_full_vocabulary(
  small, tmp_path
):
  folder = saved(tmp_path, drafter(small, W=tiny.V))
  assert load(folder, small).vocabulary.tolist() == list(range(tiny.V))
  zeros = {"d2t": np.zeros(tiny.V, np.int64), "t2d": np.zeros(tiny.V, bool)}
  change(folder, lambda w, raw: w.update(zeros))
  assert load(folder, small).vocabulary.tolist() == list(range(tiny.V))


def test_extra_input_layernorm_in_an_eagle_layer_is_refused(small, tmp_path):
  """Loaded as if it were absent, such a drafter accepts a quarter as much."""
  folder = saved(tmp_path, drafter(small, "eagle"))
  extra = {"layers.0.input_layernorm.weight": np.ones(tiny.D, np.float32)}
  change(folder, lambda weights, raw: weights.update(extra))
  with refused(
    "unexpected layers.0.input_layernorm.weight", "falls from .57 to .13"
  ):
    load(folder, small)


def ids_as_d2t(weights, raw):
  weights["d2t"] = weights["d2t"] + np.arange(len(weights["d2t"]))


def out_of_range(weights, raw):
  weights["d2t"][-1] = tiny.V


def negative(weights, raw):
  weights["d2t"][0] = -1


def no_d2t(weights, raw):
  del weights["d2t"], weights["t2d"]


def short_d2t(weights, raw):
  weights["d2t"] = weights["d2t"][:-1].copy()


def zero_d2t(weights, raw):
  weights["d2t"] *= 0
  del weights["t2d"]


def counting_d2t(weights, raw):
  weights["d2t"] = np.arange(20)
  weights["lm_head.weight"] = weights["lm_head.weight"][:20].copy()
  raw["draft_vocab_size"] = 20
  del weights["t2d"]


def twice_the_same(weights, raw):
  weights["d2t"][1] = weights["d2t"][0] - 1
  del weights["t2d"]


def other_t2d(weights, raw):
  t2d = np.roll(weights["t2d"], 1)
  assert (t2d != weights["t2d"]).any()
  weights["t2d"] = t2d


def fewer_tokens_than_ids(weights, raw):
  """A table made from 40 seen tokens, padded with nothing."""
  weights["t2d"][np.flatnonzero(weights["t2d"])[40:]] = False


def wide_t2d(weights, raw):
  weights["t2d"] = np.append(weights["t2d"], False)


def without_t2d(edit):
  def both(weights, raw):
    edit(weights, raw)
    del weights["t2d"]

  return both


@pytest.mark.parametrize(
  ("edit", "word"),
  [
    (without_t2d(ids_as_d2t), "it holds target ids"),
    (without_t2d(out_of_range), "of 0..63"),
    (without_t2d(negative), "target ids -1.."),
    (out_of_range, "t2d marks 48 ids that are not"),
    (twice_the_same, "1 of them twice"),
    (no_d2t, "d2t is missing"),
    (short_d2t, "(47,)"),
    (wide_t2d, "(65,)"),
    (zero_d2t, "never filled"),
    (counting_d2t, "no t2d to tell"),
    (other_t2d, "t2d"),
    (fewer_tokens_than_ids, "larger than the tokens it was made from"),
  ],
)
def test_wrong_ids_are_refused(edit, word, small, tmp_path):
  folder = change(saved(tmp_path, drafter(small)), edit)
  with refused(word, folder):
    load(folder, small)


def t2d_alone(weights, raw):
  del weights["d2t"]


def d2t_alone(weights, raw):
  del weights["t2d"]


def unfilled_d2t(weights, raw):
  weights["d2t"] *= 0


def unfilled_t2d(weights, raw):
  weights["t2d"] |= True


@pytest.mark.parametrize(
  "edit", [ids_as_d2t, t2d_alone, d2t_alone, unfilled_d2t, unfilled_t2d]
)
def test_tables_with_a_known_fault_are_read_right(edit, small, tmp_path):
  """Where the other table tells what this one means."""
  made = drafter(small)
  folder = change(saved(tmp_path, made), edit)
  np.testing.assert_array_equal(load(folder, small).vocabulary, made.vocabulary)


def test_counting_d2t_of_a_full_vocabulary_is_identity(small, tmp_path):
  folder = saved(tmp_path, drafter(small, W=tiny.V))
  counting = {"d2t": np.arange(tiny.V), "t2d": np.ones(tiny.V, bool)}
  change(folder, lambda w, raw: w.update(counting))
  assert load(folder, small).vocabulary.tolist() == list(range(tiny.V))


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"num_hidden_layers": 2}, ("num_hidden_layers 2", "one layer")),
    ({"hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
    ({"target_hidden_size": 48}, ("hidden_size 48", 32, "another model")),
    ({"eagle_config": {"use_aux_hidden_state": False}}, ("tapped layers",)),
    ({"norm_output": True}, ("two meanings", "--norm_output=fed_back")),
    ({"speculators_model_type": "peagle"}, ("'peagle'", "only 'eagle3'")),
    ({"speculators_model_type": "eagle3"}, ("norm_before_residual", "vLLM")),
    ({"hidden_size": 48}, ("hidden_size", 48, 32, "another model")),
    ({"vocab_size": 96}, ("vocab_size", 96, 64, "another model")),
    ({"draft_vocab_size": 65}, ("draft_vocab_size", 65)),
    ({"num_attention_heads": 3}, ("num_heads 3",)),
  ],
)
def test_drafter_of_another_shape_is_refused(changes, words, small, tmp_path):
  folder = saved(tmp_path, drafter(small))
  change(folder, lambda weights, raw: raw.update(changes))
  with refused(*words):
    load(folder, small)


def test_missing_field_of_a_drafter_is_named(small, tmp_path):
  folder = saved(tmp_path, drafter(small))
  change(folder, lambda weights, raw: raw.pop("rms_norm_eps"))
  with refused("rms_norm_eps", "missing"):
    load(folder, small)


def test_a_bias_that_is_dropped_is_missed(small, tmp_path):
  """Qwen2 heads without one of their biases still run, and draft worse."""
  folder = saved(tmp_path, drafter(small, qkv_bias=True))
  change(folder, lambda w, raw: w.pop("midlayer.self_attn.k_proj.bias"))
  with refused("missing self_attn/k_proj/bias"):
    load(folder, small)


def test_another_width_needs_tables_of_its_own(small, tmp_path):
  wide = {"hidden_size": 24, "target_hidden_size": tiny.D}
  made = drafter(small, **wide, own_embedding=True)
  folder = saved(tmp_path, made)
  same(load(folder, small).params, made.params)
  change(folder, lambda weights, raw: weights.pop("lm_head.weight"))
  with refused("missing lm_head/kernel"):
    load(folder, small)
  change(folder, lambda weights, raw: weights.pop("embed_tokens.weight"))
  with refused("its own embedding"):
    load(folder, small)


def test_a_copy_of_the_targets_table_is_not_held_twice(small, tmp_path):
  folder = saved(tmp_path, drafter(small))
  table = np.asarray(small.params["embed_tokens"]["embedding"])
  change(folder, lambda w, raw: w.update({"embed_tokens.weight": table}))
  back = load(folder, small)
  assert not back.config.own_embedding
  assert back.params["embed_tokens"] is small.params["embed_tokens"]


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_tables_of_another_size_are_refused(name, small, tmp_path):
  """Unpadded beside a padded one: the last ids would be another's."""
  folder = saved(tmp_path, drafter(small))
  table = np.ones((tiny.V - 3, tiny.D), np.float32)
  change(folder, lambda weights, raw: weights.update({name: table}))
  with refused(name, "61"):
    load(folder, small)


def test_head_and_embedding_of_two_sizes_are_refused(two, tmp_path):
  weights = target_weights(two)
  weights["lm_head.weight"] = weights["lm_head.weight"][:-3].copy()
  folder = write(tmp_path, weights, target_json(two))
  with refused("lm_head.weight has shape (32, 61)", "(32, 64)"):
    hf_target.load(folder, "float32")


def test_all_mismatches_are_in_one_message(small, tmp_path):
  folder = saved(tmp_path, drafter(small))

  def spoil(weights, raw):
    del weights["norm.weight"]
    weights["midlayer.bogus.weight"] = np.ones(3, np.float32)
    weights["fc.weight"] = np.ones((5, 7), np.float32)

  change(folder, spoil)
  with refused(
    "missing norm/scale",
    "unexpected midlayer.bogus.weight (3,)",
    "fc.weight has shape (7, 5)",
    "(96, 32)",
  ):
    load(folder, small)


# --- targets ---


@pytest.mark.parametrize("tied", [True, False])
def test_target_single_and_sharded_load_alike(tied, tmp_path):
  target = tiny.target(num_layers=2, tied_head=tied)
  weights, raw = target_weights(target), target_json(target)
  single = write(tmp_path / "single", weights, raw)
  config, params = hf_target.load(single, "float32")
  assert config == target.config
  same(params, target.params)

  sharded = write(tmp_path / "sharded", weights, raw)
  (sharded / "model.safetensors").unlink()
  names = sorted(weights)
  shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  for file, part in shards.items():
    save_file({n: weights[n] for n in part}, sharded / file)
  index = {n: file for file, part in shards.items() for n in part}
  (sharded / "model.safetensors.index.json").write_text(
    json.dumps({"weight_map": index})
  )
  config, params = hf_target.load(sharded, "float32")
  assert config == target.config
  same(params, target.params)

  (sharded / "b.safetensors").unlink()
  with refused("b.safetensors", "missing shards"):
    hf_target.load(sharded, "float32")


def test_target_in_half_precision(two, tmp_path):
  """Both ways: float32 files read as bfloat16, and bfloat16 files exactly."""
  folder = write(tmp_path, target_weights(two), target_json(two))
  config, params = hf_target.load(folder, "bfloat16")
  assert config.dtype == "bfloat16"
  rounded = jax.tree.map(lambda a: a.astype("bfloat16"), two.params)
  same(params, rounded)

  halves = {
    n: np.asarray(jnp.asarray(a, "bfloat16"))
    for n, a in target_weights(two).items()
  }
  write(tmp_path, halves, target_json(two))
  _, params = hf_target.load(folder, "float32")
  same(params, jax.tree.map(lambda a: a.astype("float32"), rounded))


def expert_weights(experts: dict, of: str) -> dict[str, np.ndarray]:
  """The experts of layer 0 by Mixtral's names."""
  names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
  return {
    f"{of}{e}.{names[matrix]}.weight": np.ascontiguousarray(part.T)
    for matrix, leaf in experts.items()
    for e, part in enumerate(np.asarray(leaf["kernel"]))
  }


def test_experts_are_stacked_and_all_there(tmp_path):
  target = tiny.target(
    family="mixtral",
    num_layers=1,
    num_experts=3,
    experts_per_token=2,
    norm_expert_weights=True,
  )
  mlp = target.params["layers_0"]["mlp"]
  block = "model.layers.0.block_sparse_moe."
  weights = {
    n: a for n, a in target_weights(target).items() if ".mlp." not in n
  }
  weights[block + "gate.weight"] = np.ascontiguousarray(
    np.asarray(mlp["router"]["kernel"]).T
  )
  weights |= expert_weights(mlp["experts"], block + "experts.")
  raw = target_json(target, num_local_experts=3, num_experts_per_tok=2)
  folder = write(tmp_path, weights, raw)
  config, params = hf_target.load(folder, "float32")
  assert config == target.config
  same(params, target.params)

  # the experts of one matrix in two files, of which one is read at a time
  sharded = write(tmp_path / "sharded", weights, raw)
  (sharded / "model.safetensors").unlink()
  names = sorted(weights)
  index = {}
  for file, part in (("a", names[::2]), ("b", names[1::2])):
    index |= dict.fromkeys(part, f"{file}.safetensors")
    save_file({n: weights[n] for n in part}, sharded / f"{file}.safetensors")
  (sharded / "model.safetensors.index.json").write_text(
    json.dumps({"weight_map": index})
  )
  same(hf_target.load(sharded, "float32")[1], target.params)

  experts = block + "experts."
  del weights[experts + "1.w2.weight"]
  weights[experts + "3.w1.weight"] = weights[experts + "0.w1.weight"]
  write(folder, weights, raw)
  with refused(
    "missing layers_0/mlp/experts/down_proj/kernel (2 of them there)",
    f"unexpected {experts}3.w1.weight",
  ):
    hf_target.load(folder, "float32")


def test_tied_target_may_store_its_head_again(tmp_path):
  target = tiny.target(num_layers=1, tied_head=True)
  weights = target_weights(target)
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  folder = write(tmp_path, weights, target_json(target))
  same(hf_target.load(folder, "float32")[1], target.params)


def test_names_without_the_model_prefix_load(two, tmp_path):
  weights = {
    n.removeprefix("model."): a for n, a in target_weights(two).items()
  }
  folder = write(tmp_path, weights, target_json(two))
  same(hf_target.load(folder, "float32")[1], two.params)


def test_target_mismatches_are_in_one_message(two, tmp_path):
  weights = target_weights(two)
  del weights["model.norm.weight"]
  q = "model.layers.1.self_attn.q_proj."
  weights[q + "weight"] = weights[q + "weight"][:, :8].copy()
  weights[q + "bias"] = np.ones(32, np.float32)  # a bias that nobody reads
  folder = write(tmp_path, weights, target_json(two))
  with refused("missing norm/scale", q + "weight", f"unexpected {q}bias"):
    hf_target.load(folder, "float32")


def test_long_lists_of_mismatches_are_cut_and_counted(small, tmp_path):
  weights = {"model.norm.weight": target_weights(small)["model.norm.weight"]}
  folder = write(tmp_path, weights, target_json(small))
  wanted = len(tensors.flatten(small.params)) - 1
  with refused(f"and {wanted - tensors.SHOWN} more"):
    hf_target.load(folder, "float32")


def test_a_tensor_in_two_shards_is_refused(two, tmp_path):
  weights = target_weights(two)
  write(tmp_path, weights, target_json(two))
  (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
  name = "model.norm.weight"
  save_file({name: weights[name]}, tmp_path / "b.safetensors")
  (tmp_path / "model.safetensors.index.json").write_text(
    json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
  )
  with refused(name, "twice"):
    hf_target.load(tmp_path, "float32")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_are_refused(keep, two, tmp_path):
  folder = write(tmp_path, target_weights(two), target_json(two))
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:keep])
  with refused(file, "truncated"):
    hf_target.load(folder, "float32")


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"model_type": "gpt2"}, ("model_type 'gpt2'", "llama", "qwen3")),
    ({"model_type": None}, ("model_type None",)),
    ({"hidden_act": "gelu"}, ("hidden_act 'gelu'", "silu")),
    ({"mlp_bias": True}, ("mlp_bias",)),
    ({"num_key_value_heads": 3}, ("num_kv_heads 3",)),
    (
      {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
      ("mlp_only_layers", "mix"),
    ),
    ({"model_type": "mixtral"}, ("num_local_experts", "missing")),
    (
      {"model_type": "mixtral", "num_local_experts": 2}
      | {"num_experts_per_tok": 3},
      ("experts_per_token 3",),
    ),
    ({"head_dim": 7}, ("head_size 7",)),
    (
      {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
      ("'dynamic'", "linear, llama3 and yarn"),
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, ("factor", "missing")),
    (
      {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
      },
      ("max_window_layers",),
    ),
  ],
)
def test_configs_we_would_compute_wrongly_are_refused(changes, words, two):
  with refused("here", *words):
    hf_target.target_config(target_json(two, **changes), "float32", "here")


@pytest.mark.parametrize(
  "field",
  ["vocab_size", "hidden_size", "rms_norm_eps", "num_attention_heads"],
)
def test_missing_fields_are_named(field, two):
  raw = target_json(two)
  del raw[field]
  with refused(field, "missing"):
    hf_target.target_config(raw, "float32")


@pytest.mark.parametrize("text", ["", "{", "not JSON", "[1, 2]", "\xff"])
def test_config_that_is_not_json_is_refused(text, tmp_path):
  (tmp_path / "config.json").write_text(text, encoding="latin-1")
  with refused(tmp_path / "config.json"):
    hf_target.load(tmp_path, "float32")


def test_index_that_is_not_json_is_refused(two, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(target_json(two)))
  index = tmp_path / "model.safetensors.index.json"
  for text in ("{", "{}"):
    index.write_text(text)
    with refused(index):
      hf_target.load(tmp_path, "float32")


def test_folder_without_files_is_refused(two, tmp_path):
  with refused("config.json does not exist"):
    hf_target.load(tmp_path, "float32")
  (tmp_path / "config.json").write_text(json.dumps(target_json(two)))
  with refused("no model.safetensors"):
    hf_target.load(tmp_path, "float32")


def test_pickles_are_read_as_tensors_only(two, tmp_path):
  """Single and sharded; half precision bit for bit; code in one is not run."""
  torch = pytest.importorskip("torch")
  weights = target_weights(two)
  halves = {
    n: torch.from_numpy(a.copy()).to(torch.bfloat16) for n, a in weights.items()
  }
  folder = write(tmp_path, weights, target_json(two))
  (folder / "model.safetensors").unlink()
  torch.save(halves, folder / "pytorch_model.bin")
  _, params = hf_target.load(folder, "float32")
  rounded = lambda a: a.astype("bfloat16").astype("float32")
  same(params, jax.tree.map(rounded, two.params))

  (folder / "pytorch_model.bin").unlink()
  names = sorted(weights)
  for file, part in (("a.bin", names[::2]), ("b.bin", names[1::2])):
    torch.save(
      {n: torch.from_numpy(weights[n].copy()) for n in part}, folder / file
    )
  index = {n: "ab"[i % 2] + ".bin" for i, n in enumerate(names)}
  (folder / "pytorch_model.bin.index.json").write_text(
    json.dumps({"weight_map": index})
  )
  same(hf_target.load(folder, "float32")[1], two.params)

  for content in (b"", b"PK", pickle.dumps({"x": print}, 2)):
    (folder / "a.bin").write_bytes(content)
    with refused("a.bin", "PyTorch"):
      hf_target.load(folder, "float32")
  torch.save({"x": test_pickles_are_read_as_tensors_only}, folder / "a.bin")
  with refused("a.bin", "PyTorch"):
    hf_target.load(folder, "float32")


def test_pickles_without_torch_are_refused(two, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  (tmp_path / "config.json").write_text(json.dumps(target_json(two)))
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  with refused("pytorch_model.bin", "pip install torch"):
    hf_target.load(tmp_path, "float32")


# --- loading by name ---


def test_names_that_are_no_folder_are_refused(tmp_path):
  for name in (str(tmp_path / "none"), "./none", "plain", "a/b/c"):
    with refused(name, "folder", "smollm2-135m-instruct"):
      loading.load_target(name, "float32", print)


@pytest.mark.parametrize("kept", ["model.safetensors", "pytorch_model.bin"])
def test_hub_pickles_are_fetched_only_without_safetensors(
  kept, tmp_path, monkeypatch
):
  import huggingface_hub

  asked = []

  def download(name, allow_patterns):
    asked.append(allow_patterns)
    if any(kept.endswith(p.removeprefix("*")) for p in allow_patterns):
      (tmp_path / kept).touch()
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  assert loading.drafter_folder("owner/name") == tmp_path
  assert (["*.bin"] in asked) == (kept == "pytorch_model.bin")
  asked.clear()
  with refused("config.json does not exist"):
    loading.target_config("owner/name", print)
  assert asked == [["*.json", "*.model", "*.jinja"]]


@pytest.mark.parametrize(
  ("generation", "config", "ends"),
  [
    ({"eos_token_id": [2, 5]}, {"eos_token_id": 9}, (2, 5)),
    ({"eos_token_id": 0}, {"eos_token_id": 9}, (0,)),
    ({}, {"eos_token_id": [9]}, (9,)),
    (None, {"eos_token_id": 3}, (3,)),
    (None, {}, ()),
  ],
)
def test_end_ids_may_be_one_or_a_list(generation, config, ends, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(config))
  if generation is not None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(generation))
  assert loading.end_ids(tmp_path) == ends


def test_another_chat_template_is_noted(small, tmp_path):
  """It costs acceptance, so it is said; it is no error."""
  folder = saved(tmp_path, drafter(small), notes={"chat_template": "A"})
  for template, notes in (("A", 0), ("B", 1)):
    tokenizer = type("Tokenizer", (), {"chat_template": template})()
    said = []
    loading.load_drafter(
      str(folder), dataclasses.replace(small, tokenizer=tokenizer), said.append
    )
    assert len(said) == notes
