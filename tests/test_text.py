"""Streaming text: whatever the chunks, the same text."""

import itertools

import pytest

from eagle_jax import text
from eagle_jax.errors import InputError
from eagle_jax.text import TextStream


def by_bytes(ids):
  """A byte-level decoder: one id, one byte."""
  return bytes(ids).decode("utf-8", errors="replace")


def by_pieces(*pieces):
  return lambda ids: "".join(pieces[i] for i in ids)


def chunkings(n):
  """Every way to cut n ids into chunks, as the lengths seen so far."""
  for bits in itertools.product((0, 1), repeat=n - 1):
    yield [i + 1 for i, b in enumerate(bits) if b] + [n]


def stream(decode, stops, ids, seen):
  """What is printed piece by piece, and the ids to keep."""
  s = TextStream(decode, stops)
  out = ""
  for n in seen:
    new, keep = s.push(ids[:n])
    out += new
    if keep is not None:
      assert s.finish(ids[:keep]) == ""
      return out, keep, s
  return out + s.finish(ids), None, s


@pytest.mark.parametrize("word", ["aé€b", "😀é", "né😀", "日本x"])
def test_every_chunking_prints_the_full_decode(word):
  ids = list(word.encode())
  for seen in chunkings(len(ids)):
    out, keep, s = stream(by_bytes, (), ids, seen)
    assert out == word == s.text
    assert keep is None


def test_incomplete_characters_are_held_back():
  ids = list("a😀".encode())
  s = TextStream(by_bytes, ())
  printed = [s.push(ids[:n])[0] for n in range(1, 6)]
  assert printed == ["a", "", "", "", "😀"]


def test_an_answer_that_ends_inside_a_character_prints_what_is_there():
  ids = list("a😀".encode())[:3]
  s = TextStream(by_bytes, ())
  assert s.push(ids)[0] == "a"
  assert s.finish(ids) == by_bytes(ids)[1:]
  assert s.text == by_bytes(ids)


@pytest.mark.parametrize(
  ("stops", "answer", "kept_text", "keep"),
  [
    (("STOP",), "hi STOPyou", "hi ", 7),
    (("é",), "caférie", "caf", 5),
    (("ab", "xyz"), "1xyab2", "1xy", 5),
    (("end", ""), "the end", "the ", 7),
    (("aab",), "aaab", "a", 4),
    (("q",), "stopless", "stopless", None),
    (("lessons",), "stopless", "stopless", None),
    # overlapping: the one that is complete first, for every chunking
    (("bc", "abcd"), "xabcdy", "xa", 4),
    (("abcd", "bc"), "xabcdy", "xa", 4),
    (("bcd", "abcd"), "xabcdy", "x", 5),
  ],
)
def test_stop_strings_cut_alike_for_every_chunking(
  stops, answer, kept_text, keep
):
  ids = list(answer.encode())
  for seen in chunkings(len(ids)):
    out, got, s = stream(by_bytes, stops, ids, seen)
    assert (out, got) == (kept_text, keep), seen
    assert s.stopped == (keep is not None)


def test_a_stop_string_inside_one_token_and_over_several():
  decode = by_pieces("hello", " wor", "ld<e", "nd> more", "x")
  for seen in chunkings(5):
    assert stream(decode, ("<end>",), [0, 1, 2, 3, 4], seen)[:2] == (
      "hello world",
      4,
    )


def test_the_beginning_of_a_stop_string_is_held_back_and_released():
  s = TextStream(by_bytes, ("<end>",))
  assert s.push(list(b"a<en"))[0] == "a"
  assert s.push(list(b"a<enx"))[0] == "<enx"


def test_ids_are_printed_where_there_is_no_tokenizer():
  assert text.decoder(None)([3, 14]) == "3 14"


def test_text_without_a_tokenizer_is_refused():
  with pytest.raises(InputError, match="prompt_ids"):
    text.encode_raw(None, "hi")
  with pytest.raises(InputError, match="prompt_ids"):
    text.encode_messages(None, text.with_system("hi", None))


def test_the_system_turn_comes_first():
  turns = text.with_system("hi", "be kind")
  assert [t["role"] for t in turns] == ["system", "user"]
  assert [t["role"] for t in text.with_system("hi", None)] == ["user"]
