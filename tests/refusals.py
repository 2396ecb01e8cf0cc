"""Refused input, as a user sees it."""

import contextlib

import pytest

from eagle_jax.errors import InputError


@contextlib.contextmanager
def refused(*words):
  """InputError of one line that has all the words."""
  with pytest.raises(InputError) as caught:
    yield
  message = str(caught.value)
  assert "\n" not in message
  for word in words:
    assert str(word) in message
