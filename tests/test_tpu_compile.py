"""The decode cycle compiles for a TPU, by the real compiler, without one."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import folders
import jax
import pytest
import tiny_run

from eagle_jax import sharding
from eagle_jax.bench import forecast, lowering, shapes
from eagle_jax.bench.lowering import Draft, Shapes
from eagle_jax.checkpoints.drafter_configs import for_target
from eagle_jax.config import TargetConfig
from eagle_jax.speculation import tree

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "tpu" / "compile.py"
CONFIG = """
import test_tpu_compile

get_config = test_tpu_compile.tiny
"""


def tiny() -> Shapes:
  """The shortest programs that have all parts of a cycle."""
  target = TargetConfig(
    family="llama",
    vocab_size=1024,
    num_layers=1,
    tied_head=False,
    hidden_size=512,
    mlp_size=1024,
    num_heads=4,
    num_kv_heads=2,
    head_size=128,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=256,
    dtype="bfloat16",
  )
  drafter = for_target(target, "eagle", target.vocab_size)
  draft = Draft(drafter, tree.dynamic(8, 2, 4), 2.0, "nowhere")
  return Shapes("tiny", target, {"eagle2": draft}, 1, 256, None)


def run(*args: str) -> subprocess.CompletedProcess:
  where = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  return subprocess.run(
    [sys.executable, SCRIPT, *args],
    # without conftest.FAST: what users compile
    env=os.environ | {"PYTHONPATH": where, "XLA_FLAGS": ""},
    capture_output=True,
    text=True,
  )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """(stdout, program -> its analysis, the Markdown, the call to repeat)."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, which holds the TPU compiler, is not installed")
  folder = tmp_path_factory.mktemp("compiled")
  config = folder / "shapes.py"
  config.write_text(CONFIG)
  call = ("--config", str(config), "--topology", "v5e:1x1", "--full")
  call += ("--out", str(folder))
  done = run(*call)
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads((folder / "predicted.json").read_text())
  by_program = {one["program"]: one for one in found.values()}
  return done.stdout, by_program, (folder / "predicted.md").read_text(), call


@pytest.fixture(scope="module")
def script():
  """The script as a module: it sets the environment, which is set back."""
  with pytest.MonkeyPatch.context() as patch:
    for name in os.environ:
      patch.setenv(name, os.environ[name])
    patch.syspath_prepend(str(SCRIPT.parent))
    before = dict(os.environ)
    module = folders.script("compile")
    for name in set(os.environ) - set(before):
      del os.environ[name]
    os.environ.update(before)
  return module


PROGRAMS = ["plain", "decode eagle2"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_in_place_and_never_waiting(made, program):
  one = made[1][program]
  assert one["caches_in_place"]
  assert one["cache_copies"].get("main to main", 0) == 0
  assert one["host_transfers"] == []
  assert one["fits"]


def test_a_verify_pass_reads_what_a_plain_pass_reads(made):
  plain, decode = (made[1][p]["stages"]["verify"]["bytes"] for p in PROGRAMS)
  assert decode <= 1.10 * plain


@pytest.mark.parametrize("program", PROGRAMS)
def test_bytes_and_products_counted_by_hand(made, program):
  """One target layer and its head; of the drafter, fc, layer and head in each
  of two runs; the products of as many rows as the runs have."""
  answer = 512 * 512 + 3 * 512 * 1024  # of a layer to its queries: o, mlp
  layer = 512 * (4 + 2 + 2) * 128 + answer
  head = 512 * 1024
  target, drafter = layer + head, 2 * 512 * 512 + layer + head
  caches = 2 * 2 * 256 * 128
  one = made[1][program]
  drafts = 2 if program != "plain" else 0
  bound = 2 * (target + caches + drafts * (drafter + caches))
  assert sum(one["bound_bytes"].values()) == pytest.approx(bound, 1e-3)
  # Models this small may stay on chip from pass to pass.
  assert 0.3 * bound <= one["hbm_bytes"] <= 1.05 * bound
  # 8 nodes; 4 rows grow a level, 3 are re-read (only the last one is asked for
  # its output and its head); a product with all slots of the cache for each
  # query head, twice
  seen = lambda rows: 2 * rows * 4 * 128 * 256
  products = target + seen(1)
  if drafts:
    products = 8 * target + seen(8)
    products += 4 * drafter + seen(4)
    products += 3 * (drafter - answer - head) + answer + head + seen(1)
  assert one["flops"] == pytest.approx(2 * products, rel=0.02)


def test_tells_and_tabulates(made):
  told, _, table, call = made
  assert "tiny, plain, v5e:1x1: fits, 0.0" in told
  assert "caches in place" in told
  (row,) = [x for x in table.splitlines() if "eagle2" in x]
  assert "| tiny | v5e:1x1 | eagle2, M=8 L=2 branch 4 |" in row
  assert table.strip() in told
  # What is there is not compiled again.
  began = (pathlib.Path(call[-1]) / "predicted.json").stat().st_mtime_ns
  assert run(*call).stdout == told
  assert (pathlib.Path(call[-1]) / "predicted.json").stat().st_mtime_ns == began


def test_kept_analyses_are_told_apart_by_all_that_made_them(monkeypatch):
  s = tiny()
  other = tree.dynamic(8, 3, 4)
  draft = dataclasses.replace(s.drafts["eagle2"], spec=other)

  def key(s=s, topology="v5e:1x1", program="plain", mesh=None, full=False):
    return forecast.key(s, program, topology, mesh, full)

  keys = [
    key(),
    key(topology="v6e:1x1"),
    key(program="decode eagle2"),
    key(mesh=(1, 1, 1)),
    key(full=True),
    key(dataclasses.replace(s, batch=2)),
    key(dataclasses.replace(s, drafts={"eagle2": draft})),
  ]
  monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
  assert len({*keys, key()}) == len(keys) + 1
  assert key(program="decode eagle2").replace("decode eagle2", "plain") == key()


def test_a_tau_stands_with_its_own_head_and_tree():
  """Of the published pairs: 4.05 with EAGLE-2's, 6.13 and 5.63 with
  EAGLE-3's; none for Qwen3."""
  found = {
    (name, d): (x.tau, x.config.draft_vocab_size, x.spec.levels)
    for name in shapes.PUBLISHED
    for d, x in shapes.of_target(name).drafts.items()
  }
  assert sorted(found.values(), key=str) == sorted(
    [(4.05, 128256, 6), (6.13, 32000, 8), (5.63, 32000, 8), (None, 32000, 8)],
    key=str,
  )


def test_a_line_through_two_depths():
  cost = lambda flops, count: {
    "verify": lowering.hlo.Cost(
      flops=flops, collectives={"all-reduce": (count, 10.0 * count)}
    )
  }
  found = lowering.extrapolate(cost(7.0, 4), cost(11.0, 8), 32)["verify"]
  assert found.flops == 3 + 2 * 32
  assert found.collectives == {"all-reduce": (64, 640)}
  grow = lambda flops: {"grow": lowering.hlo.Cost(flops=flops)}
  assert lowering.extrapolate(grow(9.0), grow(8.0), 32)["grow"].flops == 8


def test_a_train_step_lowers():
  """As tpu/compile.py --what train compiles it; here for the devices at hand,
  and no further than to the compiler's input."""
  recipe = tiny_run.config(ROOT, "", batch_size=2)
  s = dataclasses.replace(tiny(), train=recipe)
  mesh = sharding.make_mesh((1, 1, 1), jax.devices()[:1])
  text = lowering.lower_train(s, "eagle2", mesh).as_text()
  assert "tensor<2x64xi32>" in text


@pytest.mark.parametrize(
  ("args", "words"),
  [
    (["--config", "none.py"], "config 'none.py' is not a file"),
    (["--config", "configs/decode_chat.py"], "describes no shapes"),
    (["--config", "configs/smollm2_eagle3.py"], "no published drafter"),
    (["--topology", "h100:1x1"], "chip 'h100' is unknown"),
    (["--what", "prefill"], "what 'prefill' must be one of"),
    (["--drafters", "medusa"], "has no drafter 'medusa'"),
    (["--mesh", "1,1"], "must be three sizes"),
  ],
)
def test_refusals(script, args, words, capsys, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(lowering, "described", lambda topology: [None])
  fields = {"--config": "configs/llama31_8b.py", "--topology": "v6e:1x1"}
  fields |= dict([args])
  given = [word for pair in fields.items() for word in pair]
  assert folders.call(script, "compile.py", *given) == 2
  said = capsys.readouterr().err
  assert words in said
  assert len(said.splitlines()) == 1
