"""Drafters from layout to layout: bit for bit, or refused with the reason."""

import json

import numpy as np
import pytest
import tiny
from refusals import refused
from safetensors.numpy import load_file
from test_checkpoints import (
  change,
  drafter,
  saved,
  target_json,
  target_weights,
  write,
)

from eagle_jax import loading
from eagle_jax.checkpoints import convert, drafters, hf_target, tensors

BOTH = {"fc_norm": True, "norm_output": True}
SPECULATORS = {
  "norm_before_fc": True,
  "norm_before_residual": True,
  "norm_output": True,
}
WIDE = {
  "hidden_size": 24,
  "target_hidden_size": tiny.D,
  "own_embedding": True,
  "num_kv_heads": 1,
  "head_size": 10,
  "draft_vocab_size": tiny.V,
}


@pytest.fixture(scope="module")
def small():
  return tiny.target(num_layers=7, tied_head=False)


@pytest.fixture(scope="module")
def target(small, tmp_path_factory):
  """The target as a folder, which the tool reads."""
  folder = tmp_path_factory.mktemp("target")
  raw = target_json(small, architectures=["LlamaForCausalLM"])
  return str(write(folder, target_weights(small), raw))


def run(folder, target, to, out, norm_output=None):
  convert.convert(
    str(folder), target, to, out, norm_output, 5, lambda line: None
  )
  return out


def same(a: drafters.StoredDrafter, b: drafters.StoredDrafter):
  assert a.config == b.config
  assert a.weights.keys() == b.weights.keys()
  for path, array in a.weights.items():
    assert array.dtype == b.weights[path].dtype
    assert array.tobytes() == b.weights[path].tobytes(), path
  np.testing.assert_array_equal(a.vocabulary, b.vocabulary)


@pytest.mark.parametrize(
  ("to", "kind", "changes"),
  [
    ("original", "eagle", {"fc_bias": True, "qkv_bias": True}),
    ("original", "eagle3", {}),
    ("original", "eagle3", WIDE),
    ("vllm", "eagle", {"qkv_bias": True}),
    ("vllm", "eagle3", BOTH | {"taps": (1, 3, 7)}),
    ("vllm", "eagle3", SPECULATORS),
    ("vllm", "eagle3", WIDE),
    ("sglang", "eagle", {"fc_bias": True, "qkv_bias": True}),
    ("sglang", "eagle3", BOTH | {"taps": (1, 3, 7)}),
    ("speculators", "eagle3", SPECULATORS | {"taps": (1, 3, 7)}),
    ("speculators", "eagle3", {"qk_norm": True, "head_size": 16}),
    ("eagle_jax", "eagle3", BOTH | WIDE | {"qkv_bias": True}),
  ],
)
def test_there_and_back_is_bit_equal(
  to, kind, changes, small, target, tmp_path
):
  W = tiny.V if kind == "eagle" else 48
  made = drafter(small, kind, W, **changes)
  ours = saved(tmp_path / "ours", made, kind == "eagle3", dtype="bfloat16")
  there = run(ours, target, to, tmp_path / "there")
  if to != "eagle_jax":
    assert "eagle_jax" not in json.loads((there / "config.json").read_text())
  # SGLang's flag says nothing by itself: see below
  means = made.config.norm_output if to == "sglang" else None
  back = run(there, target, "eagle_jax", tmp_path / "back", means)
  read = lambda folder: drafters.read(folder, small.config)
  same(read(back), read(ours))
  theirs = load_file(there / "model.safetensors")
  assert ("midlayer.hidden_norm.weight" in theirs) == (
    kind == "eagle3" and to != "speculators"
  )


@pytest.mark.parametrize(
  "case", ["eagle2_llama", "eagle2_qwen2", "eagle3_llama"]
)
def test_official_files_go_round_as_they_are(golden, case, tmp_path):
  """Names, dtypes and bytes of the published file, through every layout that
  has a place for it."""
  data = golden(case)
  target = str(data.folder / "target")
  first = load_file(data.folder / "drafter/model.safetensors")
  route = ["eagle_jax", "sglang", "original"]
  if case == "eagle3_llama":
    route[1:1] = ["vllm", "speculators"]
  folder = data.folder / "drafter"
  for to in route:
    folder = run(folder, target, to, tmp_path / to)
  last = load_file(folder / "model.safetensors")
  assert last.keys() == first.keys()
  for name, array in first.items():
    assert array.dtype == last[name].dtype
    assert array.tobytes() == last[name].tobytes(), name


def test_official_pickle_and_safetensors_are_one(golden, tmp_path):
  pytest.importorskip("torch")
  data = golden("eagle2_llama_bin")
  out = run(
    data.folder / "drafter",
    str(data.folder / "target"),
    "original",
    tmp_path / "out",
  )
  target, params = hf_target.load(data.folder / "target", "float32")
  a = drafters.load(data.folder / "drafter", target, params)
  b = drafters.load(out, target, params)
  assert a.config == b.config
  assert not a.config.fc_bias  # the config says so, and so does the file
  assert not a.config.own_embedding  # a copy of the target's: held once
  assert a.config.rope_theta == 500000.0
  for path, leaf in tensors.flatten(a.params).items():
    np.testing.assert_array_equal(leaf, tensors.flatten(b.params)[path])


def test_configs_are_what_each_project_reads(small, target, tmp_path):
  ours = saved(tmp_path / "ours", drafter(small, taps=(2, 3, 4)))
  made = {}
  for to in ("vllm", "sglang", "speculators"):
    run(ours, target, to, tmp_path / to)
    made[to] = json.loads((tmp_path / to / "config.json").read_text())
  assert made["vllm"]["architectures"] == ["Eagle3LlamaForCausalLM"]
  assert made["vllm"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
  # SGLang counts outputs of layers
  assert made["sglang"]["architectures"] == ["LlamaForCausalLMEagle3"]
  nested = made["sglang"]["eagle_config"]
  assert nested["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
  theirs = made["speculators"]
  assert theirs["norm_before_residual"] is False
  assert theirs["transformer_layer_config"]["hidden_size"] == tiny.D
  verifier = theirs["speculators_config"]["verifier"]
  assert verifier["name_or_path"] == target
  method = theirs["speculators_config"]["proposal_methods"][0]
  assert method["speculative_tokens"] == 5
  # and fields that its own writer leaves out have its library's defaults
  for name in ("rms_norm_eps", "tie_word_embeddings", "head_dim"):
    del theirs["transformer_layer_config"][name]
  (tmp_path / "speculators/config.json").write_text(json.dumps(theirs))
  config = drafters.read(tmp_path / "speculators", small.config).config
  assert (config.norm_eps, config.head_size) == (1e-6, 8)


def test_a_drafter_on_the_targets_head_gets_its_rows(small, target, tmp_path):
  made = drafter(small)
  ours = saved(tmp_path / "ours", made, own_head=False)
  there = run(ours, target, "vllm", tmp_path / "there")
  head = small.params["lm_head"]["kernel"][:, made.vocabulary]
  theirs = load_file(there / "model.safetensors")["lm_head.weight"]
  np.testing.assert_array_equal(theirs, np.asarray(head).T)


@pytest.mark.parametrize("means", [True, False])
def test_norm_output_is_never_mapped_by_its_name(
  means, small, target, tmp_path
):
  """SpecForge's flag of that name meant whether the norm precedes the head."""
  ours = saved(tmp_path / "ours", drafter(small))
  folder = run(ours, target, "sglang", tmp_path / "there")
  change(folder, lambda weights, raw: raw.update(norm_output=True))
  with refused("two meanings", "--norm_output=fed_back", "head_only"):
    loading.load_drafter(str(folder), small, print)
  out = run(folder, target, "eagle_jax", tmp_path / "out", means)
  read = loading.load_drafter(str(out), small, print)
  assert read.config.norm_output == means


@pytest.mark.parametrize(
  ("to", "kind", "changes", "words"),
  [
    ("original", "eagle3", BOTH, ("fc_norm", "norm_output")),
    ("original", "eagle3", {"taps": (1, 3, 4)}, ("taps (1, 3, 4)",)),
    ("original", "eagle", {}, ("draft vocabulary of its own",)),
    ("vllm", "eagle3", {"fc_bias": True}, ("an fc bias",)),
    ("vllm", "eagle3", {"qkv_bias": True}, ("q/k/v biases",)),
    ("sglang", "eagle3", SPECULATORS, ("norm_before_fc", "residual")),
    ("sglang", "eagle3", {"qk_norm": True}, ("q/k norms",)),
    ("speculators", "eagle", {}, ("an EAGLE-1 drafter",)),
    ("speculators", "eagle3", WIDE, ("another width",)),
    ("medusa", "eagle3", {}, ("layout 'medusa' is unknown", "vllm")),
  ],
)
def test_what_a_layout_has_no_place_for_is_refused(
  to, kind, changes, words, small, target, tmp_path
):
  ours = saved(tmp_path / "ours", drafter(small, kind, **changes))
  with refused(*words):
    run(ours, target, to, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(small, target, tmp_path):
  ours = saved(tmp_path / "ours", drafter(small))
  with refused("exists already"):
    run(ours, target, "vllm", ours)
  drafters.read(ours, small.config)
