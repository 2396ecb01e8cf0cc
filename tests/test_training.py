"""train(): stops and resumes, refuses in one line, exports what decodes."""

import ast
import dataclasses
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny
import tiny_run
from refusals import refused

from eagle_jax import distributed, loading, sharding
from eagle_jax.checkpoints import drafters
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.models import layers, masks
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import DecoderLayer, Target
from eagle_jax.speculation import engine, tree
from eagle_jax.speculation.requests import Request
from eagle_jax.training import config as configs
from eagle_jax.training import loop, start, watch
from eagle_jax.training.config import TrainConfig

ROOT = pathlib.Path(__file__).parents[1]
quiet = lambda line: None


@pytest.fixture(scope="module")
def base(tmp_path_factory, program_cache):
  base = tmp_path_factory.mktemp("training")
  tiny_run.write(base)
  return base


@pytest.fixture(scope="module")
def run(base):
  """A finished run with real decoding; its folder."""
  c = tiny_run.config(base, "run", decode_every=20, decode_tokens=8)
  loop.train(c, quiet)
  return base / "run"


def weights(folder: pathlib.Path) -> bytes:
  return (folder / "drafter" / "model.safetensors").read_bytes()


# The run folder -------------------------------------------------------------


def test_export_decodes_losslessly(base, run):
  """What train() writes is what decoding reads, and it accepts drafts."""
  target = loading.load_target(str(base / "target"), "float32", quiet)
  drafter = loading.load_drafter(str(run / "drafter"), target, quiet)
  assert drafter.notes["trained_steps"] in (10, 20)
  decode = lambda m: engine.Engine(m, 1, None).generate(
    [Request([1, 2, 3], 40)]
  )[0]
  plain = decode(loading.models(target, None, tree.plain()))
  eagle = decode(loading.models(target, drafter, tree.chain(2)))
  assert eagle.token_ids == plain.token_ids


def test_a_variant_of_another_width_is_trained_and_read_back(base):
  c = tiny_run.config(
    base,
    "variant",
    kind="eagle3",
    taps=(0,),
    init="random",
    switches=("fc_norm", "norm_output"),
    mlp_size=24,
    epochs=1,
    eval_every=100,
  )
  loop.train(c, quiet)
  target = loading.load_target(c.target, "float32", quiet)
  found = loading.load_drafter(f"{c.out}/drafter", target, quiet).config
  assert (found.fc_norm, found.norm_output, found.norm_before_fc) == (1, 1, 0)
  assert found.mlp_size == 24 != target.config.mlp_size


def test_a_drafter_of_experts_is_as_wide_as_a_token_meets(base):
  c = tiny_run.config(base, "none")
  target = tiny.target(num_experts=4, experts_per_token=2).config
  assert loop.drafter_config(c, target).mlp_size == 2 * target.mlp_size


def test_the_folder_explains_the_run(run):
  assert json.loads((run / "config.json").read_text())["unroll_steps"] == 2
  facts = json.loads((run / "run.json").read_text())
  assert facts["steps"] == 20
  assert facts["versions"]["jax"] == jax.__version__
  assert facts["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
  for line in (run / "README.md").read_text().splitlines():
    if line.startswith("  ") and line[2] != " ":
      assert (run / line.split()[0]).exists()


def test_figures_are_logged(run):
  rows = tiny_run.rows(run, "train")
  assert [r["step"] for r in rows] == list(range(1, 21))
  last = rows[-1]
  for name in ("alpha", "hits", "feature_loss", "vocabulary_loss"):
    assert len(last[name]) == 2
  assert last["grad_norm"] > 0
  assert last["tokens_per_s"] > 0
  assert "mfu" not in last  # a CPU's peak is not known
  rates = [r["learning_rate"] for r in rows]
  assert rates[0] == 0  # warm-up
  assert max(rates) == pytest.approx(1e-2)
  assert rates[-1] < 1e-3
  held = tiny_run.rows(run, "heldout")
  assert [r["step"] for r in held] == [10, 20]
  assert held[-1]["tau"] >= 1
  (decoded,) = tiny_run.rows(run, "decode")
  assert decoded["tokens"] <= 4 * 8
  assert decoded["tau"] >= 1
  events = list((run / "tensorboard").glob("events.*"))
  assert events
  written = b"".join(f.read_bytes() for f in events)
  for tag in (b"train/loss", b"heldout/alpha/1", b"decode/tau"):
    assert tag in written


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path):
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shape = jax.ShapeDtypeStruct((2,), np.float32, sharding=place)
  state = lambda i: {"x": jax.numpy.full(2, float(i))}
  with loop.Saves(tmp_path, 2, {}) as saves:
    for i, tau in enumerate((1.5, 1.9, None, 1.7, None, None), 1):
      saves.save(i, state(i), {"step": i}, 1.9, tau)
  assert {int(p.name) for p in tmp_path.iterdir()} == {2, 5, 6}
  with loop.Saves(tmp_path, 2, {}) as saves:
    got, position, best = saves.restore({"x": shape})
  assert (float(got["x"][0]), position, best) == (6.0, {"step": 6}, 1.9)


# Stop and resume --------------------------------------------------------------


def test_sigterm_saves_and_the_run_goes_on_bit_equal(base, run, monkeypatch):
  """Stopped at a step that no save was due at."""
  c = tiny_run.config(base, "stopped")
  with monkeypatch.context() as patch:
    call = lambda: os.kill(os.getpid(), signal.SIGTERM)
    tiny_run.at_step(13, call, patch.setattr)
    with pytest.raises(loop.Stopped, match="saved at step 13 of 20"):
      loop.train(c, quiet)
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  said = []
  loop.train(c, said.append)
  assert "resumed at step 13 of 20" in said
  assert tiny_run.losses(base / "stopped") == tiny_run.losses(run)
  assert weights(base / "stopped") == weights(run)


def test_kept_features_are_the_targets(base, run):
  """Kept on disk in float16, they train to about the same losses."""
  c = tiny_run.config(
    base, "kept", features="cached", taps=(0, 1), epochs=1, eval_every=100
  )
  loop.train(c, quiet)
  got = tiny_run.losses(base / "kept")
  want = tiny_run.losses(run)[:3]
  np.testing.assert_allclose(got[:3], want, rtol=1e-2)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"epochs": 3}, ["another config", "epochs 2 there, 3 here"]),
    ({"schedule": "linear"}, ["schedule cosine there, linear here"]),
  ],
)
def test_another_recipe_does_not_resume(base, run, change, words):
  with refused(*words):
    loop.train(tiny_run.config(base, "run", **change), quiet)


def test_other_data_do_not_resume(base, run):
  """The same path with one more chat: another order, another vocabulary."""
  file = base / "train.jsonl"
  before = file.read_text()
  file.write_text(before + "\n" + before.splitlines()[0])
  try:
    with refused("trained with another data"):
      loop.train(tiny_run.config(base, "run"), quiet)
  finally:
    file.write_text(before)


def test_another_tokenizer_does_not_resume(run):
  facts = {"chat template": "x", "tokenizer": "y"}
  with (
    loop.Saves(run / "checkpoints", 2, facts) as saves,
    refused("another chat template and tokenizer"),
  ):
    saves.restore(None)


def test_the_longest_answer_is_found():
  positions = np.array([[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0, 1, 0, 0]])
  mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0]], bool)
  rows = {"mask": mask, "positions": positions, "row": np.arange(2)}
  assert loop.longest_answer(rows) == 3


# Refusals ---------------------------------------------------------------------


@pytest.mark.parametrize(
  ("change", "word"),
  [
    ({"kind": "medusa"}, "kind 'medusa' is unknown"),
    (
      {"kind": "eagle3", "taps": (1, 0)},
      "the config describes no drafter: taps",
    ),
    ({"row_length": 512}, "row_length 512 is more than the target's 256 pos"),
    ({"seed": -1}, "seed -1 must be at least 0"),
    ({"inputs": "both"}, "inputs 'both' is unknown"),
    ({"switches": ("fc_nrm",)}, "switches: 'fc_nrm' is unknown"),
    ({"switches": ("fc_norm",)}, "variants of kind 'eagle3', not of 'eagle'"),
    ({"mlp_size": -1}, "mlp_size -1 must be at least 0"),
    ({"schedule": "step"}, "schedule 'step' is unknown"),
    ({"data": ()}, "no data given"),
    ({"heldout": ()}, "no heldout given"),
    ({"epochs": 0}, "epochs 0 must be at least 1"),
    ({"loss_chunk": -1}, "loss_chunk -1 must be at least 0"),
    ({"batch_size": 1000}, "batch_size 1000 is more than"),
    ({"accumulate": 3}, "batch_size 4 does not divide into accumulate 3"),
    ({"mesh": (2, 1, 1)}, "does not fit 1 devices"),
    ({"warmup_steps": 10**6}, "warmup_steps 1000000 must be below"),
    ({"features": "disk"}, "features 'disk' is unknown"),
    ({"init": "zeros"}, "init is not last_layer or random, and drafter"),
    ({"anchor_rows": 65}, "anchor_rows 65 must be 0 (all) to row_length"),
    ({"unroll_steps": 60}, "data: no answer has 61 tokens in a row"),
    ({"decode_every": 1, "draft_vocab_size": 2}, "draft_vocab_size of 3"),
    ({"taps": (9,), "kind": "eagle3"}, "reach past the target's 1 layers"),
  ],
)
def test_refusals(base, change, word):
  c = tiny_run.config(base, "refused", **change)
  with refused(word):
    loop.train(c, quiet)
  assert not (base / "refused").exists()


def test_held_out_chats_are_never_trained_on(base):
  c = tiny_run.config(base, "refused")
  with refused("both in data and in heldout"):
    loop.train(dataclasses.replace(c, heldout=c.data), quiet)


def test_a_field_that_there_is_not_names_the_nearest():
  with refused("no field 'learning_rat'", "--config.learning_rate"):
    configs.check_overrides(["train.py", "--config.learning_rat=1"])
  configs.check_overrides(
    ["train.py", "--config.learning_rate=1", "--config=x"]
  )


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (("host:1", None, 0), ["--num_processes is missing"]),
    (("host:1", 2, 2), ["process_id 2 must be from 0 to", "1"]),
    (("host", 2, 0), ["coordinator 'host' must be host:port"]),
  ],
)
def test_processes_are_named_completely(given, words):
  with refused(*words):
    distributed.join(*given)


def test_a_cluster_is_found_only_where_there_is_one(monkeypatch):
  monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu"})
  assert distributed.cluster() is None
  os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
  assert distributed.cluster() is None
  os.environ["TPU_WORKER_HOSTNAMES"] = "a,b"
  assert distributed.cluster() == "GKE TPU"
  slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
  monkeypatch.setattr(os, "environ", slurm | {"JAX_PLATFORMS": "cpu"})
  assert distributed.cluster() is None
  os.environ["SLURM_STEP_NUM_TASKS"] = "2"
  assert distributed.cluster() == "SLURM"


def test_script_refuses_in_one_line(tmp_path):
  done = subprocess.run(
    [
      sys.executable,
      "train.py",
      "--config=configs/smollm2_eagle3.py",
      f"--config.out={tmp_path / 'run'}",
    ],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert done.returncode == 2
  assert (
    done.stderr.strip().splitlines()[-1].startswith("train.py: no data given")
  )
  assert not (tmp_path / "run").exists()


# Warm start -------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
  return sharding.make_mesh((1, 1, 1))


def saved(folder, drafter, params, own_head: bool) -> str:
  drafters.save(
    folder,
    drafter.config,
    params,
    drafter.vocabulary,
    own_head,
    {},
    "float32",
  )
  return str(folder)


def same(a: dict, b: dict) -> None:
  jax.tree.map(np.testing.assert_array_equal, dict(a), dict(b))


def test_warm_start_from_an_exported_drafter(tmp_path, mesh):
  """Trained entries come back; the head is cut anew for the new vocabulary."""
  target = tiny.target(num_layers=1)
  old = tiny.drafter(target, "eagle", W=48)
  name = saved(tmp_path / "d", old, old.params, False)
  vocabulary = np.arange(0, 60, 2, dtype=np.int32)
  config = dataclasses.replace(old.config, draft_vocab_size=30)
  got, ids = start.parameters(name, 0, config, target, vocabulary, mesh, quiet)
  assert np.array_equal(ids, vocabulary)
  trained = lambda p: {k: v for k, v in p.items() if k != "lm_head"}
  same(trained(got), trained(old.params))
  table = np.asarray(target.params["embed_tokens"]["embedding"])
  np.testing.assert_array_equal(got["lm_head"]["kernel"], table[vocabulary].T)


def test_warm_start_keeps_a_trained_head_and_its_ids(tmp_path, mesh):
  target = tiny.target(num_layers=1)
  old = tiny.drafter(target, "eagle", W=48)
  own = old.params | {
    "lm_head": {"kernel": old.params["lm_head"]["kernel"] + 1}
  }
  name = saved(tmp_path / "d", old, own, True)
  config = dataclasses.replace(old.config, draft_vocab_size=48)
  other = np.arange(48, dtype=np.int32)
  got, ids = start.parameters(name, 0, config, target, other, mesh, quiet)
  assert np.array_equal(ids, old.vocabulary)
  same(got, own)


def test_a_trained_head_is_not_frozen_away(base, run, tmp_path):
  """The export would leave it out and score with the target's rows instead."""
  target = loading.load_target(str(base / "target"), "float32", quiet)
  old = loading.load_drafter(str(run / "drafter"), target, quiet)
  own = old.params | {
    "lm_head": {"kernel": old.params["lm_head"]["kernel"] + 1}
  }
  name = saved(tmp_path / "d", old, own, True)
  with refused("has a trained head", "set train_head to True"):
    loop.train(tiny_run.config(base, "frozen", init=name), quiet)


def test_warm_start_from_another_shape_is_refused(tmp_path, mesh):
  target = tiny.target(num_layers=1)
  old = tiny.drafter(target, "eagle")
  name = saved(tmp_path / "d", old, old.params, False)
  config = dataclasses.replace(old.config, mlp_size=64, rope_theta=5e5)
  with refused("another shape", "mlp_size 48 there, 64 here", "rope_theta"):
    start.parameters(name, 0, config, target, old.vocabulary, mesh, quiet)


# Configs ----------------------------------------------------------------------

RECIPES = sorted(
  p.stem
  for p in (ROOT / "configs").glob("*.py")
  if not p.stem.startswith("decode")
)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_lab_notes(name):
  module = importlib.import_module(f"configs.{name}")
  c = module.get_config()
  assert isinstance(c, TrainConfig)
  note = " ".join(module.__doc__.split())
  assert f"python train.py --config configs/{name}.py" in note
  for word in ("Hardware: ", "--config.data=", "--config.heldout="):
    assert word in note
  configs.check(dataclasses.replace(c, data=("a",), heldout=("b",)))


def test_every_config_field_has_a_reader():
  """A field that nobody reads is a promise that nobody keeps.

  Only attributes of names that hold such a config count: `c.seed` in training
  reads TrainConfig.seed, elsewhere it reads a network's field.
  """
  package = ROOT / "eagle_jax"
  every = set(package.rglob("*.py"))
  training = set((package / "training").glob("*.py"))
  network = r"c|config|self\.config|(\w+\.)*\w*(target|drafter)(\.config)?"
  for config, holder, files in (
    (TrainConfig, r"c|(self|run)\.c(onfig)?|config", training),
    (TargetConfig, network, every),
    (DrafterConfig, network, every - training),
  ):
    read = {
      node.attr
      for file in files
      for node in ast.walk(ast.parse(file.read_text()))
      if isinstance(node, ast.Attribute)
      and isinstance(node.ctx, ast.Load)
      and re.fullmatch(holder, ast.unparse(node.value))
    }
    unread = {f.name for f in dataclasses.fields(config)} - read
    assert not unread, config.__name__


def test_flops_of_a_step_by_hand():
  """6 FLOPs a trained parameter and token, 2 a frozen one, and attention."""
  c = tiny_run.config(pathlib.Path(), "", unroll_steps=1, anchor_rows=0)
  target = tiny.target(num_layers=1)
  d = tiny.drafter(target, "eagle")
  sizes = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.ndim == 2)
  layer = sizes(target.params["layers_0"])
  head = d.params["lm_head"]["kernel"].size
  inner = sizes(d.params) - head - d.params["embed_tokens"]["embedding"].size
  H, N, T = 8, 4, c.row_length
  attention = 4 * N * H * T / 2
  want = 2 * layer + attention + 6 * inner + 3 * attention + 8 * head
  got = watch.flops_per_token(c, target.config, d.config)
  assert got == pytest.approx(want)


def test_peaks_go_by_the_longest_name():
  assert watch.peak_flops("TPU v5 lite") == 197e12
  assert watch.peak_flops("TPU v5") == 459e12
  assert watch.peak_flops("cpu") is None


def test_an_eagle1_layer_starts_as_the_last_layer_on_features():
  """f = x / rms(x) * s goes in, s / rms(x) * last_layer(x) comes out, where fc
  adds nothing by chance."""
  t = tiny.target(num_layers=1)
  rng = np.random.default_rng(0)
  D, size = t.config.hidden_size, 3.0
  scale = lambda mean: (mean * (1 + rng.uniform(-0.1, 0.1, D))).astype("f")
  last = t.params["layers_0"] | {
    "input_layernorm": {"scale": scale(0.4)},
    "post_attention_layernorm": {"scale": scale(0.3)},
  }
  s = scale(1.8)
  x = rng.normal(size=(1, 6, D)).astype("f")
  x *= size / np.sqrt((x**2).mean(-1, keepdims=True))
  positions = np.arange(6)[None]
  attend = masks.Attend(own=masks.Causal())
  layer = DecoderLayer(t.config, joined=False)
  turn = layers.rotary(positions, t.config)
  y, _ = layer.apply({"params": last}, x, positions, turn, attend, None)

  config = tiny.drafter(t, "eagle").config
  params = t.params | {"layers_0": last, "norm": {"scale": s}}
  made = start.from_last_layer(
    start.random(config, 0), config, t.config, params, size
  )
  made["fc"]["kernel"] = np.concatenate([np.zeros((D, D)), np.eye(D)])
  f = x / size * s
  ids = np.zeros((1, 6), np.int32)
  out, _ = Drafter(config).apply(
    {"params": made}, ids, f, positions, attend, None, None, ()
  )
  added, want = out - f, (y - x) / size * s
  # two norms see s within 10% of its mean instead of 1
  assert np.linalg.norm(added - want) < 0.1 * np.linalg.norm(want)
  assert np.linalg.norm(want) > 0.02 * np.linalg.norm(f)


def test_the_residual_stream_is_measured_before_the_final_norm():
  t = tiny.target(num_layers=1)
  ids = np.linspace(0, tiny.V - 1, start.SAMPLE).astype(int)[None]
  positions = np.arange(ids.shape[1])[None]
  attend = masks.Attend(own=masks.Causal())
  out, _ = Target(t.config, (1,)).apply(
    {"params": t.params}, ids, positions, attend, None
  )
  sizes = np.sqrt((np.asarray(out.taps) ** 2).mean(-1))
  assert float(start.residual_size(t)) == pytest.approx(np.median(sizes))
