"""What decoding and training cost on a TPU slice, without one.

  python tpu/compile.py --config configs/llama31_8b.py --topology v6e:1x1

Compiles the real programs with the real compiler (pip install libtpu) for
slices that are only described, reads the result and predicts. Lists of
configs, topologies and programs make a table; --out keeps it as JSON and
Markdown, and a run that is repeated goes on where it was stopped.
"""

import dataclasses
import os
import pathlib
import runpy
import sys

# Read by libtpu and JAX when they start: no cloud is asked who this machine
# is, JAX does not wait for a TPU, and two compilations at a time do not meet
# at the lock that guards a real one.
os.environ.update(
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  JAX_PLATFORMS="cpu",
  TPU_ACCELERATOR_TYPE="v5litepod-8",
  TPU_SKIP_MDS_QUERY="1",
  TPU_WORKER_HOSTNAMES="localhost",
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags

from eagle_jax import script, sharding
from eagle_jax.bench import forecast, shapes
from eagle_jax.bench.lowering import Shapes
from eagle_jax.errors import InputError
from eagle_jax.training.config import TrainConfig

F = flags.FLAGS
flags.DEFINE_list("config", None, "configs/*.py files.")
flags.DEFINE_list("topology", None, "Slices, such as v5e:2x4 or v5p:2x2x1.")
flags.DEFINE_list(
  "what", ["plain", "decode"], f"Of {', '.join(forecast.WHAT)}."
)
flags.DEFINE_list("drafters", [], "Of the config; default: all.")
flags.DEFINE_integer("batch", None, "Rows decoded together; default: config's.")
flags.DEFINE_integer("capacity", None, "Cache slots; default: the config's.")
flags.DEFINE_list(
  "mesh", None, "data,fsdp,tensor; default 1,1,0 to decode, 1,0,1 to train."
)
flags.DEFINE_bool(
  "full", False, "Compile all layers instead of 2 and 4 of them."
)
flags.DEFINE_string("out", None, "Folder of predicted.json and predicted.md.")


def read_config(path: str, values: flags.FlagValues) -> Shapes:
  """Shapes of a training config's target, or what the config describes."""
  if not pathlib.Path(path).is_file():
    raise InputError(f"config {path!r} is not a file")
  made = runpy.run_path(path)["get_config"]()
  if isinstance(made, TrainConfig):
    made = dataclasses.replace(shapes.of_target(made.target), train=made)
  if not isinstance(made, Shapes):
    raise InputError(
      f"config {path!r} describes no shapes to compile: use one like"
      " configs/llama31_8b.py"
    )
  changes = {
    name: values[name].value
    for name in ("batch", "capacity")
    if values[name].value is not None
  }
  return dataclasses.replace(made, **changes)


def run(f: flags.FlagValues) -> None:
  configs = [read_config(path, f) for path in f.config]
  sizes = sharding.mesh_sizes(f.mesh) if f.mesh else None
  out = pathlib.Path(f.out) if f.out else None
  results = forecast.Results(out)
  for s in configs:
    for topology in f.topology:
      for program in forecast.programs(s, f.what, f.drafters):
        name = forecast.key(s, program, topology, sizes, f.full)
        if name not in results.found:
          found = forecast.analyse(s, program, topology, sizes, f.full)
          results.put(name, found, configs)
        print(forecast.told(results.found[name]), flush=True)
  print(forecast.table(results.found, configs))


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "topology"])
  script.run("compile.py", run)
