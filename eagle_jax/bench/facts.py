"""What every figure carries: device, date, versions."""

import datetime
import importlib.metadata
import os
import platform

import jax


def cpu_name() -> str:
  """The processor's own name; the architecture where none is told."""
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as f:
      for line in f:
        if line.startswith("model name"):
          return line.split(":", 1)[1].strip()
  except OSError:  # no Linux
    pass
  return platform.processor() or platform.machine()


def of_machine() -> dict:
  """device, host, date and versions, ready for JSON."""
  device = jax.devices()[0]
  kind = cpu_name() if device.platform == "cpu" else device.device_kind
  return {
    "date": datetime.date.today().isoformat(),
    "device": f"{kind} x{jax.device_count()}",
    "host": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()}",
    "versions": {
      p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax")
    },
  }
