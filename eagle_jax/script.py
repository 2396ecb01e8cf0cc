"""The shell of a `python -m` tool: flags in, one line and code 2 on refusal."""

import sys
from collections.abc import Callable

from absl import app, flags, logging

from eagle_jax.errors import InputError


def run(name: str, work: Callable[[flags.FlagValues], None]) -> None:
  """Parse the command line and do the work; never returns.

  Args:
    name: of the tool, before each refusal.
    work: gets the parsed flags; its InputError is printed without traceback.
  """

  def main(argv):
    logging.set_verbosity(logging.WARNING)  # the libraries', not ours
    try:
      if len(argv) > 1:
        raise InputError(f"{argv[1]!r} is not a flag")
      work(flags.FLAGS)
    except InputError as e:
      print(f"{name}: {e}", file=sys.stderr)
      sys.exit(2)

  def parse(argv):
    try:
      return flags.FLAGS(argv)
    except flags.Error as e:
      print(f"{name}: {' '.join(str(e).split())}", file=sys.stderr)
      sys.exit(2)

  app.run(main, flags_parser=parse)
