"""Train a drafter: python train.py --config configs/smollm2_eagle3.py"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from eagle_jax.errors import InputError
from eagle_jax.training import loop

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "a configs/*.py file; override fields as --config.field=x"
)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"{argv[1]!r} is not a flag")
  logging.set_verbosity(logging.WARNING)  # Orbax reports every rename
  try:
    folder = loop.train(_CONFIG.value)
  except InputError as e:
    print(f"train.py: {e}", file=sys.stderr)
    sys.exit(2)
  print(f"best drafter: {folder}")


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  app.run(main)
