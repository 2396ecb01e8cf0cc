"""What every measured figure carries: device, date, versions."""

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


def device() -> str:
  """The devices that decode: kind and number; of a CPU its cores."""
  first = jax.devices()[0]
  if first.platform == "cpu":
    return f"{cpu_name()}, {os.cpu_count()} cores"
  return f"{first.device_kind} x{jax.device_count()}"


def facts() -> dict:
  """device, host, date and versions, ready for JSON."""
  return {
    "date": datetime.date.today().isoformat(),
    "device": device(),
    "host": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()}",
    "versions": {
      p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax")
    },
  }
