"""The shell of every command: flags in, one line and code 2 on refusal."""

import logging
import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from eagle_jax.errors import InputError

Work = Callable[[flags.FlagValues], None]


Check = Callable[[Sequence[str]], None]


def parse(
  name: str,
  values: flags.FlagValues,
  argv: Sequence[str],
  check: Check | None = None,
) -> list[str]:
  """What is left of the command line; exits where a flag cannot be read."""
  try:
    if check:
      check(argv)
    return values(argv)
  except (InputError, flags.Error) as e:
    print(f"{name}: {' '.join(str(e).split())}", file=sys.stderr)
    sys.exit(2)


def main(
  name: str, work: Work, values: flags.FlagValues, argv: Sequence[str]
) -> None:
  """Do the work; an InputError is one line, with -v a traceback."""
  verbose = values.verbosity > 0
  # the libraries', not ours; absl's own setter would change the -v flag
  logging.getLogger("absl").setLevel(logging.WARNING)
  try:
    if len(argv) > 1:
      raise InputError(f"{argv[1]!r} is not a flag: see {name} --help")
    work(values)
  except InputError as e:
    if verbose:
      raise
    print(f"{name}: {e}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    sys.exit(130)  # what a shell expects of Ctrl-C


def run(name: str, work: Work, check: Check | None = None) -> None:
  """Parse the command line and do the work; never returns.

  Args:
    name: of the command, before each refusal.
    work: gets the parsed flags.
    check: refuses a command line that flags would misread.
  """
  app.run(
    lambda argv: main(name, work, flags.FLAGS, argv),
    flags_parser=lambda argv: parse(name, flags.FLAGS, argv, check),
  )
