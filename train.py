"""Train a drafter: python train.py --config configs/smollm2_eagle3.py \\
  --config.data="('chats.jsonl',)" --config.heldout="('heldout.jsonl',)"

On TPU pods, GKE TPU slices and SLURM start the same command in every process;
elsewhere name the processes with --coordinator, --num_processes, --process_id.
After SIGTERM the run is saved and the exit code is 143, so that a scheduler
starts it again; the same command resumes it.
"""

import sys

from absl import flags
from ml_collections import config_flags

from eagle_jax import distributed, script
from eagle_jax.training import config, loop

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "a configs/*.py file; override fields as --config.field=x"
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, on clusters unknown to JAX"
)
_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.")
_PROCESS = flags.DEFINE_integer(
  "process_id", None, "Which one this is, from 0."
)


def run(_) -> None:
  distributed.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
  try:
    folder = loop.train(_CONFIG.value)
  except loop.Stopped as e:
    print(f"train.py: {e}; the same command resumes it", file=sys.stderr)
    sys.exit(143)
  print(f"best drafter: {folder}")


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  script.run("train.py", run, config.check_overrides)
