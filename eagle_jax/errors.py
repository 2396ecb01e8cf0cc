"""The one error type for refused input."""


class InputError(ValueError):
  """Input that the user can mend: one line with what, which value, the fix.

  The scripts print it without a traceback and exit with code 2.
  """
