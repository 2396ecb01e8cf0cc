"""Chat files, masks and packing."""

import json

import numpy as np
import pytest
from refusals import refused

from eagle_jax.errors import InputError
from eagle_jax.training import chats, data

TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
  "<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
  """Characters as tokens, ChatML markers, a chat template."""
  from tokenizers import AddedToken, Tokenizer, decoders, models
  from tokenizers import pre_tokenizers as pre
  from transformers import PreTrainedTokenizerFast

  alphabet = sorted(pre.ByteLevel.alphabet())
  raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  raw.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
  raw.decoder = decoders.ByteLevel()
  raw.add_special_tokens(
    [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
  )
  return PreTrainedTokenizerFast(
    tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE
  )


def chat(*turns, cut=False):
  roles = ("user", "assistant")
  messages = [
    {"role": roles[i % 2], "content": text} for i, text in enumerate(turns)
  ]
  return chats.Chat(messages, cut, "here:1")


def marked(tokenizer, document):
  return tokenizer.decode(document.ids[document.mask])


def test_mask_covers_the_answer_and_its_end_of_turn(tokenizer):
  d = chats.tokenize(tokenizer, chat("hi there", "yes é"))
  assert marked(tokenizer, d) == "yes é<|im_end|>"
  # the very token after the generation prompt is the first marked one
  first = int(np.argmax(d.mask))
  assert tokenizer.decode(d.ids[:first]).endswith("<|im_start|>assistant\n")


def test_mask_of_several_turns(tokenizer):
  d = chats.tokenize(tokenizer, chat("a", "one", "b", "two"))
  assert marked(tokenizer, d) == "one<|im_end|>two<|im_end|>"


def test_cut_answer_has_no_end_of_turn(tokenizer):
  d = chats.tokenize(tokenizer, chat("a", "one", "b", "tw", cut=True))
  assert marked(tokenizer, d) == "one<|im_end|>tw"
  assert tokenizer.decode(d.ids).endswith("tw")


@pytest.mark.parametrize(
  ("turns", "word"), [(("only a question",), "no token")]
)
def test_all_zero_mask_is_refused(tokenizer, turns, word):
  d = chats.tokenize(tokenizer, chat(*turns))
  with pytest.raises(InputError, match=word) as e:
    chats.check_masks([d], tokenizer, "file")
  assert "only a question" in str(e.value)  # a decoded sample
  assert "\n" not in str(e.value)


def test_all_one_mask_is_refused(tokenizer):
  d = chats.Document(np.arange(5, dtype=np.int32), np.ones(5, bool))
  with pytest.raises(InputError, match="every token"):
    chats.check_masks([d], tokenizer, "file")


def test_template_that_rewrites_earlier_turns_is_refused(tokenizer):
  """Some templates drop earlier reasoning: the span cannot be told."""
  tokenizer = type(tokenizer)(
    tokenizer_object=tokenizer.backend_tokenizer,
    eos_token="<|im_end|>",
    chat_template="{{ messages | length }}" + TEMPLATE,
  )
  with pytest.raises(InputError, match="renders a turn differently"):
    chats.tokenize(tokenizer, chat("a", "b", "c", "d"))


@pytest.mark.parametrize(
  ("line", "word"),
  [
    ("{", ":2: not valid JSON"),
    ("[1]", ":2: a JSON object is wanted"),
    ('{"messages": []}', ":2: 'messages' must be a list"),
    ('{"text": "x"}', ":2: 'messages' must be a list"),
    (
      '{"messages": [{"role": "tool", "content": "x"}]}',
      ":2: each message needs role",
    ),
    (
      '{"messages": [{"role": "user", "content": ["x"]}]}',
      ":2: each message needs role",
    ),
  ],
)
def test_bad_rows_name_file_and_line(tmp_path, line, word):
  file = tmp_path / "chats.jsonl"
  good = {"messages": [{"role": "user", "content": "x"}]}
  file.write_text(json.dumps(good) + "\n" + line + "\n")
  with pytest.raises(InputError, match=word) as e:
    chats.read_chats(file)
  assert "\n" not in str(e.value)


def test_empty_and_missing_files(tmp_path):
  file = tmp_path / "none.jsonl"
  with pytest.raises(InputError, match="cannot be read"):
    chats.read_chats(file)
  file.write_text("\n\n")
  with pytest.raises(InputError, match="no rows"):
    chats.read_chats(file)


def test_a_unicode_line_separator_does_not_split_a_row(tmp_path):
  file = tmp_path / "chats.jsonl"
  row = {"messages": [{"role": "user", "content": "a\u2028b"}]}
  file.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
  assert chats.read_chats(file)[0].messages[0]["content"] == "a\u2028b"


def test_packing_keeps_every_document_whole():
  rng = np.random.default_rng(0)
  docs = [
    chats.Document(rng.integers(1, 99, n).astype(np.int32), rng.random(n) < 0.5)
    for n in rng.integers(3, 40, 30)
  ]
  packed = data.pack(docs, 40)
  found = []
  for r in range(len(packed)):
    for number in range(1, packed.documents[r].max() + 1):
      at = packed.documents[r] == number
      assert (packed.positions[r][at] == np.arange(at.sum())).all()
      found.append((packed.tokens[r][at].tolist(), packed.mask[r][at].tolist()))
  want = [(d.ids.tolist(), d.mask.tolist()) for d in docs]
  assert sorted(found) == sorted(want)
  assert (packed.tokens[packed.documents == 0] == 0).all()
  assert not packed.mask[packed.documents == 0].any()


def test_draft_vocabulary_is_the_most_frequent_ascending():
  ids = np.array([5, 5, 5, 9, 9, 2, 7], np.int32)
  mask = np.array([1, 1, 1, 1, 1, 1, 0], bool)
  documents = [chats.Document(ids, mask)]
  assert data.draft_vocabulary(documents, 2, 12).tolist() == [5, 9]
  # more than were seen: the lowest unseen ids fill up
  assert data.draft_vocabulary(documents, 5, 12).tolist() == [0, 1, 2, 5, 9]


def test_appended_chats_leave_earlier_rows_as_they_were():
  rng = np.random.default_rng(0)
  docs = [
    chats.Document(np.full(n, n, np.int32), np.ones(n, bool))
    for n in rng.integers(3, 15, 12)
  ]
  few = data.pack_windows(docs[:8], 16, 4)
  more = data.pack_windows(docs, 16, 4)
  assert len(more) > len(few)
  assert (more.tokens[: len(few)] == few.tokens).all()
  assert (more.documents[: len(few)] == few.documents).all()


@pytest.fixture(scope="module")
def ten_rows():
  numbers = np.repeat(np.arange(10, dtype=np.int32)[:, None], 3, 1)
  return data.Packed(numbers, numbers > 4, numbers + 1, numbers + 2)


def all_rows(packed, process=(0, 1), epochs=2, seed=3, batch=4):
  found = data.iterator(packed, batch, seed, *process, epochs)
  return np.stack([b["row"] for b in found])


def test_an_epoch_is_a_seeded_permutation(ten_rows):
  rows = all_rows(ten_rows)
  assert rows.shape == (4, 4)  # two batches an epoch, two rows left out
  for epoch in (rows[:2], rows[2:]):
    assert len(set(epoch.ravel().tolist())) == 8
  assert (rows[:2] != rows[2:]).any()
  assert (rows == all_rows(ten_rows)).all()
  assert (rows != all_rows(ten_rows, seed=4)).any()


def test_a_batch_holds_what_its_rows_hold(ten_rows):
  batch = next(data.iterator(ten_rows, 4, 0, 0, 1, 1))
  for name in ("tokens", "mask", "documents", "positions"):
    want = getattr(ten_rows, name)[batch["row"]]
    assert (batch[name] == want).all()
    assert batch[name].dtype == want.dtype


def test_processes_share_each_global_batch(ten_rows):
  parts = [all_rows(ten_rows, (p, 2)) for p in range(2)]
  assert (np.concatenate(parts, axis=1) == all_rows(ten_rows)).all()


def test_the_position_is_kept(ten_rows):
  want = all_rows(ten_rows)
  for at in range(4):
    first = data.iterator(ten_rows, 4, 3, 0, 1, 2)
    for _ in range(at):
      next(first)
    state = json.loads(json.dumps(first.get_state()))
    other = data.iterator(ten_rows, 4, 3, 0, 1, 2)
    other.set_state(state)
    rest = np.stack([b["row"] for b in other])
    assert (rest == want[at:]).all()


@pytest.mark.parametrize(
  ("batch", "processes", "word"),
  [(3, 2, "not a multiple of the 2"), (11, 1, "more than the 10 rows")],
)
def test_batches_that_do_not_fit(ten_rows, batch, processes, word):
  with refused(word):
    data.iterator(ten_rows, batch, 0, 0, processes, 1)
