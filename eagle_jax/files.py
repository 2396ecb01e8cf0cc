"""Output folders, and files that a kill never leaves half written."""

import json
import pathlib

from eagle_jax.errors import InputError


def make_folder(name: str) -> pathlib.Path:
  """The folder of --out, made where it is not there."""
  folder = pathlib.Path(name)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise InputError(
      f"out {name!r} cannot be made a folder ({e.strerror})"
    ) from None
  return folder


def read_kept(file: pathlib.Path):
  """What an earlier run left as JSON."""
  try:
    return json.loads(file.read_text(encoding="utf-8"))
  except ValueError as e:
    raise InputError(
      f"{file} is damaged ({e}): remove it, and it is made anew"
    ) from None


def write_whole(file: pathlib.Path, text: str) -> None:
  """Write the text under another name, then give it this one."""
  part = file.with_name(f"{file.name}.part")
  part.write_text(text, encoding="utf-8")
  part.replace(file)
