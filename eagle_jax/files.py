"""Files that a kill never leaves half written."""

import pathlib


def write_whole(file: pathlib.Path, text: str) -> None:
  """Write the text under another name, then give it this one."""
  part = file.with_name(f"{file.name}.part")
  part.write_text(text, encoding="utf-8")
  part.replace(file)
