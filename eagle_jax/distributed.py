"""Joining the processes of a slice or cluster: JAX's own runtime, no more.

After `join`, `jax.devices()` lists the devices of all processes, and every
process runs the same program on its share of the arrays.
"""

import importlib.util
import os
import pathlib

import jax

from eagle_jax.errors import InputError


def cluster() -> str | None:
  """The cluster that started this process, of those JAX finds its way in.

  None: a process of its own, which must not wait for others.
  """
  env = os.environ
  if "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
    return "SLURM"
  if "," in env.get("TPU_WORKER_HOSTNAMES", ""):
    return "GKE TPU"
  if "MEGASCALE_COORDINATOR_ADDRESS" in env:
    return "multi-slice TPU"
  on_tpu = (env.get("JAX_PLATFORMS") or "tpu").startswith("tpu")
  chips = any(
    next(pathlib.Path("/dev").glob(pattern), None)
    for pattern in ("accel[0-9]*", "vfio/[0-9]*")
  )
  if on_tpu and chips and importlib.util.find_spec("libtpu"):
    return "TPU VM"
  return None


def join(
  coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
  """Join the other processes, before anything else touches JAX.

  Args:
    coordinator: host:port of process 0; with the other two, for clusters that
      JAX does not know. All None: found by itself on TPU pods, GKE and SLURM,
      else this process is the only one.

  Raises:
    InputError: some of the three without the others.
  """
  given = {
    "coordinator": coordinator,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == 3:
    if cluster():
      jax.distributed.initialize()
    return
  if missing:
    raise InputError(
      f"--{missing[0]} is missing: --coordinator, --num_processes and"
      " --process_id belong together"
    )
  if not 0 <= process_id < num_processes:
    raise InputError(
      f"process_id {process_id} must be from 0 to num_processes - 1 ="
      f" {num_processes - 1}"
    )
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdigit():
    raise InputError(
      f"coordinator {coordinator!r} must be host:port of process 0"
    )
  jax.distributed.initialize(coordinator, num_processes, process_id)
