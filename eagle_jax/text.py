"""Text around token ids: prompts, streaming, stop strings."""

import functools
from collections.abc import Callable, Sequence

from eagle_jax.errors import InputError

_BROKEN = "\ufffd"  # what a decoder writes for an incomplete character


class TextStream:
  """Turns a growing list of ids into text that can be printed at once.

  Bytes of a character that is not complete yet are held back, and so is the
  beginning of what may become a stop string. Everything printed, joined, is
  the decoded whole.

  Args:
    decode: ids -> text. stops: stop strings, cut from the text.
  """

  def __init__(
    self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]
  ):
    self._decode = decode
    self._stops = [s for s in stops if s]
    self.text = ""  # what was handed out
    self.stopped = False

  def push(self, ids: Sequence[int]) -> tuple[str, int | None]:
    """(new text, ids to keep if a stop string is complete, else None).

    Args:
      ids: all ids of the answer so far.
    """
    whole = self._decode(ids)
    if self._find(whole) is not None:
      self.stopped = True
      # The first id that completes a stop string decides, not the chunk.
      keep = next(
        k
        for k in range(1, len(ids) + 1)
        if self._find(self._decode(ids[:k])) is not None
      )
      whole = self._decode(ids[:keep])
      return self._hand_out(whole[: self._find(whole)]), keep
    end = len(whole.rstrip(_BROKEN))
    for stop in self._stops:
      for n in range(len(stop) - 1, 0, -1):
        if whole[:end].endswith(stop[:n]):
          end = min(end, len(whole[:end]) - n)
          break
    return self._hand_out(whole[:end]), None

  def finish(self, ids: Sequence[int]) -> str:
    """The rest, when no more ids will come."""
    if self.stopped:
      return ""
    whole = self._decode(ids)
    new = self._hand_out(whole)
    self.text = whole  # also where the decoder changed what was printed
    return new

  def _find(self, text: str) -> int | None:
    found = [i for s in self._stops if (i := text.find(s)) >= 0]
    return min(found) if found else None

  def _hand_out(self, upto: str) -> str:
    if not upto.startswith(self.text):
      return ""  # the decoder changed its mind; later text follows again
    new = upto[len(self.text) :]
    self.text = upto if new else self.text
    return new


def decoder(tokenizer) -> Callable[[Sequence[int]], str]:
  """ids -> text without special tokens; ids as numbers without tokenizer."""
  if tokenizer is None:
    return lambda ids: " ".join(map(str, ids))
  return functools.partial(
    tokenizer.decode,
    skip_special_tokens=True,
    clean_up_tokenization_spaces=False,
  )


@functools.cache
def _byte_of() -> dict[str, int]:
  """The characters by which byte-level tokenizers write bytes: printable
  Latin-1 as itself, the other 68 from U+0100 on, in order."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [b for b in range(256) if b not in shown]
  table = {chr(b): b for b in shown}
  return table | {chr(256 + n): b for n, b in enumerate(hidden)}


def piece(tokenizer) -> Callable[[int], str]:
  """id -> the text of that token alone; the number without a tokenizer.

  Bytes that are no whole character come as lone surrogates (Python's
  "surrogateescape"), so that the pieces of an answer still join to its text.
  """

  def one(i: int) -> str:
    if tokenizer is None:
      return str(i)
    text = tokenizer.decode([i], skip_special_tokens=False)
    if _BROKEN not in text:
      return text
    token = tokenizer.convert_ids_to_tokens(i)
    if len(token) == 6 and token.startswith("<0x"):  # sentencepiece's
      raw = bytes([int(token[3:5], 16)])
    elif all(c in _byte_of() for c in token):
      raw = bytes(_byte_of()[c] for c in token)
    else:
      return text
    return raw.decode("utf-8", "surrogateescape")

  return one


def visible(text: str) -> str:
  """Lone bytes of `piece` as \\xNN, so that any terminal can print them."""
  raw = text.encode("utf-8", "surrogateescape")
  return raw.decode("utf-8", "backslashreplace")


def encode_messages(tokenizer, messages: Sequence[dict]) -> list[int]:
  """Chat messages -> prompt ids, ready for the assistant's answer."""
  if tokenizer is None:
    raise InputError(
      "the target has no tokenizer: give prompt_ids instead of text"
    )
  if not tokenizer.chat_template:
    raise InputError(
      "the target's tokenizer has no chat template: use raw for plain text"
    )
  try:
    text = tokenizer.apply_chat_template(
      list(messages), tokenize=False, add_generation_prompt=True
    )
  except Exception as e:  # templates refuse what they cannot render
    raise InputError(
      f"the chat template refuses these messages ({e}): mend the roles, or use"
      " raw"
    ) from None
  return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_raw(tokenizer, text: str) -> list[int]:
  """Plain text -> ids, with the special tokens the tokenizer adds itself."""
  if tokenizer is None:
    raise InputError(
      "the target has no tokenizer: give prompt_ids instead of text"
    )
  return tokenizer(text)["input_ids"]


def with_system(prompt: str, system: str | None) -> list[dict]:
  """One user turn, after a system turn if there is one."""
  turns = [{"role": "user", "content": prompt}]
  return ([{"role": "system", "content": system}] if system else []) + turns
