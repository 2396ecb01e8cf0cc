"""The one error type for refused input, and words for it."""

from collections.abc import Iterable, Mapping


class InputError(ValueError):
  """Input that the user can mend: one line with what, which value, the fix.

  The scripts print it without a traceback and exit with code 2.
  """


def differences(there: Mapping, here: Mapping, names: Iterable[str]) -> str:
  """Of the named fields those that differ, "mlp_size 48 there, 64 here; ..";
  an empty text where none does."""
  return "; ".join(
    f"{n} {there.get(n)} there, {here.get(n)} here"
    for n in names
    if there.get(n) != here.get(n)
  )
