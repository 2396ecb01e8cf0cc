"""What needs 8 devices; run by test_sharding.py in a process that has them."""

import dataclasses
import functools
import json
import pathlib
import re
import threading
import time

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_losses
import tiny
import tiny_run
from safetensors.numpy import save_file

from eagle_jax import Sampling, command, loading, options, sharding
from eagle_jax.checkpoints import tensors
from eagle_jax.errors import InputError
from eagle_jax.models.drafter import Drafter
from eagle_jax.models.target import Target
from eagle_jax.speculation import engine, sampling, tree
from eagle_jax.speculation.requests import Request
from eagle_jax.training import start, step
from eagle_jax.training.losses import Batch

quiet = lambda line: None


# Decoding --------------------------------------------------------------------


MIXTURE = (("num_experts", 4), ("experts_per_token", 2))


@functools.cache
def pair(experts: tuple = ()):
  target = tiny.target(
    num_layers=1, num_heads=8, num_kv_heads=4, head_size=4, **dict(experts)
  )
  return target, tiny.drafter(target, "eagle")


@pytest.fixture(scope="module")
def decode():
  """mesh sizes -> tokens of two rows, one greedy and one drawn."""
  patch = pytest.MonkeyPatch()
  patch.setattr(engine, "SMALLEST_CAPACITY", 64)
  patch.setattr(engine, "PREFILL_BUCKETS", (32,))
  patch.setattr(sampling, "_WIDE", 8)  # children are found as in a wide head
  patch.setattr(sampling, "_GROUP", 4)
  requests = [
    Request([1, 2, 3], 16),
    Request([4, 5], 16, Sampling(temperature=0.8, draft_noise=0.5), 7, 1),
  ]

  @functools.cache
  def run(sizes, experts=()):
    mesh = sizes and sharding.make_mesh(sizes)
    m = loading.models(*pair(experts), tree.chain(2), mesh=mesh)
    if mesh and experts:  # each expert is cut, none is dealt out whole
      kernel = m.target_params["layers_0"]["mlp"]["experts"]["up_proj"][
        "kernel"
      ]
      assert kernel.addressable_shards[0].data.shape == (4, tiny.D, 48 // 4)
    e = engine.Engine(m, 2, 60)
    results = e.generate(requests)
    if mesh:  # drafting sends what must travel, and XLA adds nothing to it
      (text,) = (p.as_text() for k, p in e.programs.items() if k[0] == "chunk")
      sent = [x for x in text.splitlines() if "/grow/" in x]
      assert not [x for x in sent if re.search(r"collective-p|all-to-all", x)]
    return [(r.token_ids, r.accept_lengths) for r in results]

  yield run
  patch.undo()


@pytest.mark.parametrize(
  ("sizes", "experts"), [((1, 1, 8), ()), ((2, 1, 4), ()), ((2, 1, 4), MIXTURE)]
)
def test_a_mesh_gives_the_tokens_of_one_device(decode, sizes, experts):
  """8 ways cut 8 query heads but not the 4 kv heads; 4 ways cut both."""
  assert decode(sizes, experts) == decode(None, experts)


def test_decode_py_over_a_mesh(tmp_path, capfd):
  models = folders.pair(tmp_path)
  (tmp_path / "prompts.txt").write_text("hello\nwhy\n")

  def rows(**how):
    out = tmp_path / "rows.jsonl"
    command.run(
      options.DecodeOptions(
        target=models.target,
        drafter=models.drafter,
        prompts_file=str(tmp_path / "prompts.txt"),
        batch_size=2,
        max_new_tokens=16,
        temperature=0.8,
        output=str(out),
        **how,
      )
    )
    read = [json.loads(line) for line in out.read_text().splitlines()]
    return [r["token_ids"] for r in read]

  assert rows(mesh=["2", "1", "0"]) == rows(tree="dynamic")
  assert "tree auto: a mesh is not timed" in capfd.readouterr().err
  for mesh, word in (
    ("a,1,1", "mesh 'a,1,1' must be numbers"),
    ("1,8,1", "8 fsdp devices, which only training uses"),
    ("8,1,1", "batch_size 2 does not divide"),
  ):
    with pytest.raises(InputError, match=word):
      rows(mesh=mesh.split(","))


def test_a_batch_must_divide_over_the_data_axis():
  mesh = sharding.make_mesh((2, 1, 4))
  m = loading.models(*pair(), tree.chain(2), mesh=mesh)
  with pytest.raises(InputError, match="batch_size 3 does not divide"):
    engine.Engine(m, 3, 60)


# Training --------------------------------------------------------------------

MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]


class OnMesh:
  """The first five steps of a tiny recipe, on a mesh."""

  def __init__(self, sizes, devices, heads, **changes):
    base = pathlib.Path("unused")
    self.c = tiny_run.config(base, "", batch_size=8, **changes)
    self.mesh = sharding.make_mesh(sizes, devices)
    N, K = heads
    target = tiny.target(num_layers=1, num_heads=N, num_kv_heads=K)
    d = tiny.drafter(target, "eagle")
    self.n = step.Networks(Target(target.config), Drafter(d.config))
    trained, rest = step.split(d.params, False)
    head = d.params["lm_head"]["kernel"]
    frozen = step.Frozen(target.params, rest, head, jnp.array(d.vocabulary))
    self.frozen_places = step.frozen_shardings(frozen, self.n, self.mesh, quiet)
    self.frozen = start.placed(frozen, self.frozen_places)
    self.optimizer = step.make_optimizer(self.c, 20)
    state = step.initial_state(self.c, self.optimizer, trained)
    self.places = step.state_shardings(
      state, self.optimizer, self.n, self.mesh, quiet
    )
    self.state = start.placed(state, self.places)

  def batch(self, i: int) -> Batch:
    docs = [test_losses.documents([20, 11], 10 * i + b) for b in range(8)]
    packed = [test_losses.pack(d, 32) for d in docs]
    fields = [
      np.concatenate([getattr(p, f) for p in packed])
      for f in ("tokens", "mask", "documents", "positions")
    ]
    place = sharding.batch(self.mesh, "train")
    return Batch(*(jax.device_put(x, place) for x in fields), None, None)

  def five_steps(self):
    """First gradients, and the losses of five steps; one program."""
    train_step = step.make_train_step(self.c, self.n, self.optimizer, self.mesh)
    gradients = step.make_gradients(self.c, self.n, self.mesh)

    def both(state, frozen, batch):
      key = jax.random.wrap_key_data(state.key)
      key = jax.random.fold_in(key, state.step)  # as the step has it
      grads = gradients(state.params, frozen, batch, key)[2]
      return *train_step(state, frozen, batch), grads

    everywhere = sharding.replicated(self.mesh)
    run = jax.jit(
      both,
      in_shardings=(
        self.places,
        self.frozen_places,
        sharding.batch(self.mesh, "train"),
      ),
      out_shardings=(self.places, everywhere, self.places.params),
    )
    run = run.lower(self.state, self.frozen, self.batch(0)).compile()
    self.hlo = run.as_text()
    losses = []
    for i in range(5):
      self.state, report, made = run(self.state, self.frozen, self.batch(i))
      losses.append(float(report["loss"]))
      if not i:
        grads = tensors.flatten(jax.device_get(made))
    return grads, losses


SMALL = {"anchor_rows": 24, "row_length": 32, "feature_noise": 0.0}


@functools.cache
def one_device(heads):
  return OnMesh((1, 1, 1), jax.devices()[:1], heads, **SMALL).five_steps()


# SmolLM2's 9 query and 3 kv heads divide over nothing: they stay whole
@pytest.mark.parametrize(
  ("sizes", "heads"), [*((m, (4, 2)) for m in MESHES), ((1, 2, 4), (9, 3))]
)
def test_a_mesh_trains_as_one_device(sizes, heads):
  one = one_device(heads)
  # once in parts and computed anew, which changes nothing either
  saving = {"accumulate": 2, "remat": True, "loss_chunk": 7}
  on = OnMesh(
    sizes, None, heads, **SMALL, **(saving if sizes == (2, 2, 2) else {})
  )
  grads, losses = on.five_steps()
  for path, want in one[0].items():
    scale = np.abs(want).max()
    np.testing.assert_allclose(
      grads[path] / scale, want / scale, atol=1e-5, err_msg=path
    )
  np.testing.assert_allclose(losses[0], one[1][0], rtol=1e-5)
  np.testing.assert_allclose(losses, one[1], rtol=1e-4)
  if sizes == (1, 8, 1):  # weights travel, the batch's activations do not
    moved = r"= \(?\w+\[8,\d+,\d+\].* (all-reduce|all-gather|all-to-all)\("
    assert not re.search(moved, on.hlo)
  moments = jax.tree.leaves(on.state.optimizer)
  cut = [not a.sharding.is_fully_replicated for a in moments]
  assert any(cut) == (sizes != (8, 1, 1))


# Loading ---------------------------------------------------------------------


def test_weights_go_into_their_shards_without_a_whole_copy(tmp_path):
  """Host memory beyond the arrays themselves stays below the largest tensor."""
  D, F, V = 1024, 4096, 65536
  config = tiny.target_config(
    vocab_size=V, hidden_size=D, mlp_size=F, num_layers=4, head_size=64
  )
  rng = np.random.default_rng(0)
  make = lambda *s: rng.integers(-99, 99, s, np.int8).astype(np.float16)
  file = tmp_path / "model.safetensors"
  # the largest comes last, when all others are on the devices
  shapes = {"z": (V, D)} | {f"up{i}": (F, D) for i in range(16)}
  save_file({n: make(*s) for n, s in shapes.items()}, file)
  mesh = sharding.make_mesh((1, 2, 4))
  axes = sharding.table(config, mesh, "train", quiet)
  places = {
    n: jax.NamedSharding(
      mesh,
      jax.P(axes["vocab"], axes["embed"])
      if n == "z"
      else jax.P(axes["embed"], axes["mlp"]),
    )
    for n in shapes
  }
  largest = 2 * V * D
  total = sum(2 * a * b for a, b in shapes.values())
  peak, done = [0], threading.Event()

  def resident() -> int:
    """Bytes of this process that are no file's."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

  def watch():
    while not done.is_set():
      peak[0] = max(peak[0], resident())
      time.sleep(0.002)

  before = resident()
  watcher = threading.Thread(target=watch)
  watcher.start()
  made = {}
  for name, tensor in tensors.stored([file]):
    tensor = tensor if name == "z" else tensor.T
    made[name] = tensors.place(tensor, "float16", places[name])
    made[name].block_until_ready()
  done.set()
  watcher.join()
  assert peak[0] - before < total + largest + tensors.BLOCK
  assert made["up3"].addressable_shards[0].data.shape == (D // 2, F // 4)
  want = {
    n: t.read((slice(0, 9),) * 2, np.float16) for n, t in tensors.stored([file])
  }
  for name in ("z", "up3"):
    part = want[name] if name == "z" else want[name].T
    np.testing.assert_array_equal(np.asarray(made[name][:9, :9]), part)


def test_a_model_read_into_shards_is_the_model(tmp_path):
  tiny_run.write(tmp_path)
  folder = str(tmp_path / "target")
  whole = loading.load_target(folder, "float32", print)
  mesh = sharding.make_mesh((1, 2, 4))
  cut = loading.load_target(folder, "float32", quiet, mesh, "train")
  jax.tree.map(np.testing.assert_array_equal, cut.params, whole.params)
  places = sharding.parameters(whole.params, whole.config, mesh, "train", quiet)
  same = jax.tree.map(
    lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), cut.params, places
  )
  assert all(jax.tree.leaves(same))
  assert dataclasses.asdict(cut.config) == dataclasses.asdict(whole.config)
