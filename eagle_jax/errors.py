"""The one error type for refused input, and words for it."""

from collections.abc import Iterable, Mapping


class InputError(ValueError):
  """Input that the user can mend: one line with what, which value, the fix.

  The scripts print it without a traceback and exit with code 2.
  """


def check_least(given: object, **least: int) -> None:
  """Refuses values below what their names may have.

  Args:
    given: has the values as attributes (flags, options).
  """
  for name, bound in least.items():
    value = getattr(given, name)
    if value < bound:
      raise InputError(f"{name} {value} must be at least {bound}")


def differences(there: Mapping, here: Mapping, names: Iterable[str]) -> str:
  """Of the named fields those that differ, "mlp_size 48 there, 64 here; ..";
  an empty text where none does."""
  return "; ".join(
    f"{n} {there.get(n)} there, {here.get(n)} here"
    for n in names
    if there.get(n) != here.get(n)
  )
