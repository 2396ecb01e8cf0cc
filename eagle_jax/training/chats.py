"""Chats as rows of data: their forms, chat templates, which tokens carry loss.

A row that cannot be used raises `BadRow`, whose text is the reason; whoever
reads many rows lists them with file and line, and goes on.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator

import jinja2
import numpy as np

from eagle_jax.errors import InputError

# The names of OpenAI messages, and of ShareGPT and its descendants.
ROLES = {
  "system": "system",
  "user": "user",
  "human": "user",
  "assistant": "assistant",
  "gpt": "assistant",
  "function_call": "assistant",
  "tool": "tool",
  "observation": "tool",
}
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class BadRow(InputError):
  """A row that cannot be used; the text says why."""


@dataclasses.dataclass(frozen=True)
class Chat:
  """One conversation.

  messages: role system, user, assistant or tool, and content (text); an
    assistant's may have reasoning_content and tool_calls, and weight 0 where
    it carries no loss. cut: the last answer ends without an end-of-turn.
  where: file:line, for messages to people. tools: function schemas.
  """

  messages: list[dict]
  cut: bool
  where: str
  tools: list[dict] | None = None


@dataclasses.dataclass(frozen=True)
class Document:
  """One tokenised chat: ids int32[n] and mask bool[n], 1 on assistant tokens
  (the end-of-turn token included)."""

  ids: np.ndarray
  mask: np.ndarray


# Files ---------------------------------------------------------------------


def json_lines(file: pathlib.Path) -> Iterator[tuple[str, dict | BadRow]]:
  """(file:line, object) of each line that is not blank, or what is wrong."""
  try:
    with file.open("rb") as lines:
      for number, line in enumerate(lines, 1):
        if line.strip():
          yield f"{file}:{number}", _json_object(line)
  except OSError as e:
    raise InputError(f"{file}: cannot be read ({e})") from None


def _json_object(line: bytes) -> dict | BadRow:
  try:
    row = json.loads(line.decode("utf-8-sig"))
  except UnicodeDecodeError as e:
    return BadRow(f"cannot be read as UTF-8 ({e.reason})")
  except json.JSONDecodeError as e:
    return BadRow(f"not valid JSON ({e.msg})")
  if not isinstance(row, dict):
    return BadRow(f"a JSON object is wanted, this is {type(row).__name__}")
  return row


def read_jsonl(file: pathlib.Path) -> list[tuple[str, dict]]:
  """(file:line, object) of each line; refuses broken lines and empty files."""
  rows = list(json_lines(file))
  for where, row in rows:
    if isinstance(row, BadRow):
      raise InputError(f"{where}: {row}")
  if not rows:
    raise InputError(f"{file}: no rows: give a JSONL file with one a line")
  return rows


# Forms ---------------------------------------------------------------------


def read_chat(row: dict, where: str) -> Chat:
  """A row of OpenAI messages or of ShareGPT as one form.

    {"messages": [{"role": "user", "content": "hi"}, ...]}
    {"conversations": [{"from": "human", "value": "hi"}, ...]}

  Content may be a list of parts of text. `finish_reason` "length" says that
  the last answer was cut, `weight` 0 that a turn carries no loss.

  Raises:
    BadRow: what a chat template would render wrongly without a word.
  """
  turns = row.get("messages", row.get("conversations"))
  if not isinstance(turns, list) or not turns:
    raise BadRow("'messages' must be a list with one or more")
  messages = [_message(turn) for turn in turns]
  said = [m for m in messages if m["role"] != "system"]
  if said and said[0]["role"] == "assistant" and messages[0] is said[0]:
    raise BadRow("begins with an assistant turn")
  return Chat(
    messages, row.get("finish_reason") == "length", where, _tools(row)
  )


def _message(turn) -> dict:
  name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
  if not isinstance(name, str) or name not in ROLES:
    raise BadRow(
      f"each message needs a role of {', '.join(ROLES)}; found"
      f" {json.dumps(turn, ensure_ascii=False)[:80]}"
    )
  message = {"role": ROLES[name], "content": ""}
  content = turn.get("content", turn.get("value"))
  calls = list(turn.get("tool_calls") or [])
  if isinstance(turn.get("reasoning_content"), str):
    message["reasoning_content"] = turn["reasoning_content"]
  if name == "function_call":
    calls.append(content)
  elif isinstance(content, list):
    for part in content:
      _add_part(message, calls, part)
  elif isinstance(content, str):
    message["content"] = content
  elif content is not None or not calls:
    raise BadRow(
      f"content of the {message['role']} turn must be text; found"
      f" {json.dumps(content)[:80]}"
    )
  if calls:
    message["tool_calls"] = [_call(c) for c in calls]
  if not calls and not message["content"].strip() and name != "system":
    raise BadRow(f"an empty {message['role']} turn")
  try:
    message["content"].encode()
  except UnicodeEncodeError:
    raise BadRow("half a surrogate pair in a text") from None
  if turn.get("weight", 1) not in (0, 1):
    raise BadRow(f"weight {turn['weight']!r} of a turn must be 0 or 1")
  if turn.get("weight", 1) == 0:
    message["weight"] = 0
  return message


def _add_part(message: dict, calls: list, part) -> None:
  """Put a part of a content list where it belongs."""
  kind = part.get("type") if isinstance(part, dict) else None
  value = part.get("text", part.get("value")) if kind else None
  if not isinstance(value, str) or kind not in (
    "text",
    "reasoning",
    "tool_call",
  ):
    raise BadRow(f"content has a part that is no text, of type {kind!r}")
  if kind == "tool_call":
    calls.append(value)
  else:
    field = "content" if kind == "text" else "reasoning_content"
    message[field] = message.get(field, "") + value


def _call(call) -> dict:
  """A tool call as {"type": "function", "function": {name, arguments}}."""
  try:
    call = json.loads(call) if isinstance(call, str) else call
    call = call.get("function", call)
    arguments = call["arguments"]
    if isinstance(arguments, str):
      arguments = json.loads(arguments)
    function = {"name": call["name"], "arguments": arguments}
  except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
    raise BadRow(
      f"a tool call without name and JSON arguments: {str(call)[:60]!r}"
    ) from None
  return {"type": "function", "function": function}


def _tools(row: dict) -> list[dict] | None:
  tools = row.get("tools")
  try:
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
  except json.JSONDecodeError:
    raise BadRow("'tools' is not valid JSON") from None
  if tools and not (
    isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
  ):
    raise BadRow("'tools' must be a list of function schemas")
  return tools or None


# Masks ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Turn:
  """An assistant turn: the text before it, and the text with it."""

  before: str
  upto: str
  number: int  # of its message


def tokenize(tokenizer, chat: Chat) -> list[Document]:
  """Render with the tokenizer's chat template and mark assistant tokens.

  What the assistant said is found by rendering prefixes of the conversation:

    render(m[:i], with generation prompt)  <s>user hi</s><s>assistant
    render(m[:i+1])                        <s>user hi</s><s>assistant yes</s>.
    loss on                                                          ^^^^^^^

  and only where the template has `{% generation %}` marks, if it has any.
  Turns after the last answer carry no loss and are left out.

  A template may render a turn differently when more turns follow (Qwen3 drops
  earlier reasoning). The target never sees its own turn so when it writes it;
  such turns get a document of their own, in which they come last:

    u1 <think>..</think> a1                    loss on a1 with its reasoning
    u1 a1 u2 <think>..</think> a2              loss on a2 with its reasoning

  Raises:
    BadRow: what the template does not render, or no or every token marked.
  """
  _check_fits(tokenizer, chat)
  turns = [
    _turn(tokenizer, chat, i)
    for i, m in enumerate(chat.messages)
    if m["role"] == "assistant"
  ]
  if not turns:
    raise BadRow("no assistant turn")
  documents = []
  while turns:
    last = turns[-1]
    same = [t for t in turns if last.upto.startswith(t.upto)]
    turns = [t for t in turns if t not in same]
    same = [t for t in same if chat.messages[t.number].get("weight", 1)]
    cut = chat.cut and last.number == len(chat.messages) - 1
    if same:
      documents.append(_document(tokenizer, chat, last, same, cut))
  if not documents:
    raise BadRow("every assistant turn has weight 0")
  return documents[::-1]


def _check_fits(tokenizer, chat: Chat) -> None:
  """Refuses what the template would drop, or the tokenizer misread."""
  template = tokenizer.get_chat_template(tools=chat.tools)
  for field, used in (
    ("tools", bool(chat.tools)),
    ("tool_calls", any("tool_calls" in m for m in chat.messages)),
    ("tool", any(m["role"] == "tool" for m in chat.messages)),
  ):
    if used and not re.search(rf"\b{field}\b", template):
      raise BadRow(f"the chat template has no place for {field}")
  for m in chat.messages:
    found = [t for t in tokenizer.all_special_tokens if t in m["content"]]
    if found:
      raise BadRow(f"a text holds the special token {found[0]!r}")


def _render(tokenizer, chat: Chat, turns: int, prompt: bool) -> str:
  try:
    return tokenizer.apply_chat_template(
      chat.messages[:turns],
      chat.tools,
      tokenize=False,
      add_generation_prompt=prompt,
    )
  except (jinja2.TemplateError, TypeError) as e:
    why = " ".join(str(e).split())
    raise BadRow(f"the chat template refuses it ({why})") from None


def _turn(tokenizer, chat: Chat, number: int) -> _Turn:
  before = _render(tokenizer, chat, number, True)
  upto = _render(tokenizer, chat, number + 1, False)
  if not upto.startswith(before):
    raise BadRow("the chat template renders an answer apart from its prompt")
  return _Turn(before, upto, number)


def _document(
  tokenizer, chat: Chat, last: _Turn, marked: list[_Turn], cut: bool
) -> Document:
  """`last.upto` as tokens, with loss on the marked turns."""
  text, eos = last.upto, tokenizer.eos_token
  spans = []
  for t in marked:
    end = t.upto.rfind(eos, len(t.before))
    spans.append((len(t.before), end + len(eos) if end >= 0 else len(t.upto)))
  stop = len(text)
  if cut:  # the model did not end its turn here
    end = text.rfind(eos, len(last.before))
    stop = end if end >= 0 else stop
  marks = None
  if _MARKS.search(tokenizer.get_chat_template(tools=chat.tools)):
    encoded = tokenizer.apply_chat_template(
      chat.messages[: last.number + 1],
      chat.tools,
      return_dict=True,
      return_assistant_tokens_mask=True,
      tokenizer_kwargs={"return_offsets_mapping": True},
    )
    marks = np.asarray(encoded["assistant_masks"], bool)
    # how much of the end of a turn counts is for the marks to say
    spans = [(len(t.before), len(t.upto)) for t in marked]
  else:
    encoded = tokenizer(
      text, add_special_tokens=False, return_offsets_mapping=True
    )
  ids = np.asarray(encoded["input_ids"], np.int32)
  start, end = np.reshape(encoded["offset_mapping"], (-1, 2)).T
  mask = np.zeros(len(ids), bool)
  for a, b in spans:
    mask |= (start >= a) & (end <= b)
  mask = mask if marks is None else mask & marks
  inside = end <= stop
  ids, mask = ids[inside], mask[inside]
  if not mask.any() or mask.all():
    share = "every" if mask.any() else "no"
    raise BadRow(
      f"{share} token is marked as the assistant's in a chat that renders as"
      f" {tokenizer.decode(ids[:40])!r}"
    )
  return Document(ids, mask)
