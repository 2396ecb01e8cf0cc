"""Chat files, chat templates, and which tokens carry loss."""

import dataclasses
import json
import pathlib

import numpy as np

from eagle_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Chat:
  """One conversation. cut: its last answer ends without an end-of-turn."""

  messages: list[dict]
  cut: bool
  where: str  # file:line, for messages


@dataclasses.dataclass(frozen=True)
class Document:
  """One tokenised chat: ids int32[n] and mask bool[n], 1 on assistant tokens
  (the end-of-turn token included)."""

  ids: np.ndarray
  mask: np.ndarray


def read_jsonl(file: pathlib.Path) -> list[tuple[str, dict]]:
  """(file:line, object) of each line; refuses broken lines and empty files."""
  try:
    text = file.read_text(encoding="utf-8-sig")
  except (OSError, UnicodeDecodeError) as e:
    raise InputError(f"{file}: cannot be read ({e})") from None
  rows = []
  for number, line in enumerate(text.split("\n"), 1):
    if not line.strip():
      continue
    where = f"{file}:{number}"
    try:
      row = json.loads(line)
    except json.JSONDecodeError as e:
      raise InputError(f"{where}: not valid JSON ({e.msg})") from None
    if not isinstance(row, dict):
      raise InputError(
        f"{where}: a JSON object is wanted, this is {type(row).__name__}"
      )
    rows.append((where, row))
  if not rows:
    raise InputError(f"{file}: no rows: give a JSONL file with one a line")
  return rows


def check_messages(messages, where: str) -> list[dict]:
  """Refuses what a chat template would render wrongly without a word."""
  if not isinstance(messages, list) or not messages:
    raise InputError(f"{where}: 'messages' must be a list with one or more")
  for m in messages:
    fit = isinstance(m, dict) and isinstance(m.get("content"), str)
    if not fit or m.get("role") not in ("system", "user", "assistant"):
      raise InputError(
        f"{where}: each message needs role system, user or assistant and"
        f" content as text; found {json.dumps(m)[:80]}"
      )
  return messages


def read_chats(file: pathlib.Path) -> list[Chat]:
  """OpenAI messages, a conversation a line."""
  return [
    Chat(
      check_messages(row.get("messages"), where),
      row.get("finish_reason") == "length",
      where,
    )
    for where, row in read_jsonl(file)
  ]


def tokenize(tokenizer, chat: Chat) -> Document:
  """Render with the tokenizer's chat template and mark assistant tokens.

  The span of a turn is found by rendering prefixes of the conversation:

    render(m[:i], with generation prompt)  <s>user hi</s><s>assistant
    render(m[:i+1])                        <s>user hi</s><s>assistant yes</s>.
    loss on                                                          ^^^^^^^
  """

  def render(messages, prompt=False):
    return tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=prompt
    )

  text = render(chat.messages)
  spans = []
  for i, message in enumerate(chat.messages):
    if message["role"] != "assistant":
      continue
    before = render(chat.messages[:i], prompt=True)
    upto = render(chat.messages[: i + 1])
    if not (upto.startswith(before) and text.startswith(upto)):
      raise InputError(
        f"{chat.where}: the chat template renders a turn differently when"
        " more turns follow, so that its tokens cannot be marked"
      )
    body = upto[len(before) :]
    end = body.find(tokenizer.eos_token, len(message["content"].rstrip()))
    end = len(body) if end < 0 else end + len(tokenizer.eos_token)
    spans.append((len(before), len(before) + end))
  if chat.cut and spans:
    # The answer was cut: the model did not end its turn here.
    start, _ = spans[-1]
    length = text[start:].rfind(tokenizer.eos_token)
    text = text[: start + length] if length >= 0 else text
    spans[-1] = (start, len(text))
  encoded = tokenizer(
    text, add_special_tokens=False, return_offsets_mapping=True
  )
  ids = np.asarray(encoded["input_ids"], np.int32)
  offsets = np.asarray(encoded["offset_mapping"])
  mask = np.zeros(len(ids), bool)
  for start, end in spans:
    mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
  return Document(ids, mask)


def check_masks(documents: list[Document], tokenizer, where: str) -> None:
  """An all-zero or all-one mask is a template that was not understood."""
  for d in documents:
    if d.mask.any() and not d.mask.all():
      continue
    share = "no" if not d.mask.any() else "every"
    sample = tokenizer.decode(d.ids[:40])
    raise InputError(
      f"{where}: {share} token is marked as the assistant's in a chat that"
      f" renders as {sample!r}: does the template mark assistant turns, and"
      " has the chat an answer?"
    )
