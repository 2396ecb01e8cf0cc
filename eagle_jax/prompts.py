"""Prompt files: a prompt a line, or JSONL with prompt or messages."""

import json
import pathlib

from eagle_jax.errors import InputError
from eagle_jax.training import chats


def read(file: pathlib.Path) -> list[str | list[dict]]:
  """Prompts as text, or as chat messages.

  A file whose first line is a JSON object is JSONL: `prompt` (text),
  `messages` (a chat that ends on the user), or `turns` (texts; the first
  counts).

  Raises:
    InputError: an empty or malformed file, with file and line.
  """
  try:
    text = file.read_text(encoding="utf-8-sig")
  except (OSError, UnicodeDecodeError) as e:
    raise InputError(f"{file}: cannot be read ({e})") from None
  lines = [line for line in text.split("\n") if line.strip()]
  if not lines:
    raise InputError(f"{file}: no prompts: give one a line")
  if not lines[0].lstrip().startswith("{"):
    return lines
  return [_prompt(row, where) for where, row in chats.read_jsonl(file)]


def _prompt(row: dict, where: str) -> str | list[dict]:
  if "prompt" in row:
    if not isinstance(row["prompt"], str) or not row["prompt"]:
      raise InputError(
        f"{where}: prompt {json.dumps(row['prompt'])[:60]} must be a text, not"
        " empty"
      )
    return row["prompt"]
  if "turns" in row:
    turns = row["turns"]
    fit = isinstance(turns, list) and turns
    if not fit or not isinstance(turns[0], str) or not turns[0]:
      raise InputError(
        f"{where}: turns {json.dumps(turns)[:60]} must be a list of texts, the"
        " first not empty"
      )
    return turns[0]
  if "messages" in row:
    try:
      chat = chats.read_chat(row, where)
    except chats.BadRow as e:
      raise InputError(f"{where}: {e}") from None
    messages = chat.messages
    if chat.tools or any(m.keys() - {"role", "content"} for m in messages):
      raise InputError(f"{where}: a prompt takes no tools: give plain turns")
    if messages[-1]["role"] != "user":
      raise InputError(
        f"{where}: the last message is the {messages[-1]['role']}'s: end the"
        " chat on a user turn"
      )
    return messages
  raise InputError(
    f"{where}: neither prompt, messages nor turns in a row with"
    f" {', '.join(map(json.dumps, row)) or 'no fields'}"
  )


def parse_ids(text: str) -> list[int]:
  """Comma-separated token ids."""
  try:
    ids = [int(part) for part in text.split(",")]
  except ValueError:
    raise InputError(
      f"prompt_ids {text[:60]!r} must be comma-separated numbers, such as"
      " 1,42,7"
    ) from None
  return ids
