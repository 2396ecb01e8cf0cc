"""Prompt files, good and broken, and lists of ids."""

import pytest

from eagle_jax import prompts
from eagle_jax.errors import InputError


def read(tmp_path, text: str, encoding: str = "utf-8"):
  file = tmp_path / "p.jsonl"
  file.write_text(text, encoding=encoding)
  return prompts.read(file)


def test_plain_lines(tmp_path):
  assert read(tmp_path, "one\n\n  \ntwo {\n") == ["one", "two {"]


def test_jsonl(tmp_path):
  chat = (
    '[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]'
  )
  text = (
    '{"prompt": "one", "id": 3}\n\n'
    f'{{"messages": {chat}}}\n'
    '{"question_id": 1, "turns": ["first", "second"]}\n'
  )
  assert read(tmp_path, text) == [
    "one",
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    "first",
  ]


def test_a_byte_order_mark_is_no_text(tmp_path):
  assert read(tmp_path, "one\ntwo", "utf-8-sig") == ["one", "two"]


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("", ["p.jsonl: no prompts"]),
    ("\n \n", ["p.jsonl: no prompts"]),
    ('{"prompt": "a"}\n{"prompt": \n', ["p.jsonl:2: not valid JSON"]),
    ('{"prompt": "a"}\nplain\n', ["p.jsonl:2: not valid JSON"]),
    ('{"prompt": "a"}\n\n[1]\n', ["p.jsonl:3:", "JSON object", "list"]),
    ('{"text": "a", "b": 1}\n', ["p.jsonl:1: neither", '"text", "b"']),
    ("{}\n", ["p.jsonl:1: neither", "no fields"]),
    ('{"prompt": ""}\n', ['p.jsonl:1: prompt ""', "not empty"]),
    ('{"prompt": 7}\n', ["p.jsonl:1: prompt 7", "a text"]),
    ('{"turns": []}\n', ["p.jsonl:1: turns []", "list of texts"]),
    ('{"turns": [""]}\n', ['p.jsonl:1: turns [""]', "not empty"]),
    ('{"turns": "hi"}\n', ['p.jsonl:1: turns "hi"', "list of texts"]),
    ('{"messages": []}\n', ["p.jsonl:1: 'messages' must be a list"]),
    ('{"messages": [{"role": "bot", "content": "x"}]}', ["p.jsonl:1:", "bot"]),
    (
      '{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
      ["p.jsonl:1: a prompt takes no tools"],
    ),
    (
      '{"messages": [{"role": "user", "content": "x"},'
      ' {"role": "assistant", "content": "y"}]}',
      ["p.jsonl:1: the last message is the assistant's", "user turn"],
    ),
  ],
)
def test_broken_files_name_file_and_line(tmp_path, text, words):
  with pytest.raises(InputError) as e:
    read(tmp_path, text)
  for word in words:
    assert word in str(e.value)


def test_unreadable_files(tmp_path):
  for file in (tmp_path, tmp_path / "none.txt"):
    with pytest.raises(InputError, match="cannot be read"):
      prompts.read(file)
  with pytest.raises(InputError, match="cannot be read"):
    read(tmp_path, "é", "latin-1")


def test_parse_ids():
  assert prompts.parse_ids("1, 42,7") == [1, 42, 7]
  for text in ("", "1,,2", "1;2", "a", "1.5", "1,"):
    with pytest.raises(InputError, match="comma-separated"):
      prompts.parse_ids(text)
