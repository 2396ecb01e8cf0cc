"""Packing and the iterator over packed rows."""

import json

import numpy as np
import pytest
from refusals import refused

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


def document(n: int, fill: int | None = None) -> chats.Document:
  ids = np.arange(n) if fill is None else np.full(n, fill)
  return chats.Document(ids.astype(np.int32), np.arange(n) % 2 == 0)


def pack(documents, T, window=100, long="split"):
  sizes = [len(d.ids) for d in documents]
  return data.pack_windows(documents, sizes, T, window, long)


def test_packing_keeps_every_document_whole():
  rng = np.random.default_rng(0)
  docs = [
    chats.Document(rng.integers(1, 99, n).astype(np.int32), rng.random(n) < 0.5)
    for n in rng.integers(3, 40, 30)
  ]
  packed = pack(docs, 40)
  rows = packed.everything()
  found = []
  for r in range(len(packed)):
    for number in range(1, rows["documents"][r].max() + 1):
      at = rows["documents"][r] == number
      assert (rows["positions"][r][at] == np.arange(at.sum())).all()
      found.append(
        (rows["tokens"][r][at].tolist(), rows["mask"][r][at].tolist())
      )
  want = [(d.ids.tolist(), d.mask.tolist()) for d in docs]
  assert sorted(found) == sorted(want)
  empty = rows["documents"] == 0
  assert (rows["tokens"][empty] == 0).all()
  assert not rows["mask"][empty].any()
  assert packed.padding == pytest.approx(empty.mean())


@pytest.mark.parametrize("long", data.LONG)
def test_long_documents_against_a_loop(long):
  sizes = [3, 9, 10, 12, 13, 27]
  want = []
  for i, n in enumerate(sizes):
    tokens = list(range(n))
    while tokens:
      window, tokens = tokens[:9], tokens[9:]
      if len(window) >= 3:
        want.append((i, window))
      if long == "cut":
        break
  found = [
    (p.document, list(range(p.start, p.stop)))
    for p in data.pieces(sizes, 9, long)
  ]
  assert found == want


def test_a_window_starts_anew():
  rows = pack([document(13)], 8).everything()
  assert rows["tokens"].tolist() == [[*range(8)], [8, 9, 10, 11, 12, 0, 0, 0]]
  assert rows["positions"][1].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
  assert rows["mask"][1, :5].tolist() == [True, False, True, False, True]
  with refused("long_chats 'drop'", "split, cut"):
    pack([document(13)], 8, long="drop")


def test_bucket_waste():
  # 5 tokens in a row of 8, 9 in one of 12 (the longest)
  assert data.bucket_waste(pack([document(5), document(9)], 12)) == 1 - 14 / 20


def test_draft_vocabulary_is_the_most_frequent_ascending():
  counts = np.bincount([5, 5, 5, 9, 9, 2], minlength=12)
  assert data.draft_vocabulary(counts, 2).tolist() == [5, 9]
  # more than were seen: the lowest unseen ids fill up
  assert data.draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 5, 9]


def test_appended_chats_leave_earlier_rows_as_they_were():
  sizes = np.random.default_rng(0).integers(3, 15, 12)
  docs = [document(n, fill=i) for i, n in enumerate(sizes)]
  few = pack(docs[:8], 16, 4)
  more = pack(docs, 16, 4)
  assert len(more) > len(few)
  assert more.plan[: len(few)] == few.plan
  assert (more.take([0])["tokens"] == few.take([0])["tokens"]).all()


@pytest.fixture(scope="module")
def ten_rows():
  return pack([document(3, fill=i) for i in range(10)], 3)


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
  assert (batch["tokens"] == batch["row"][:, None]).all()
  for name, want in ten_rows.take(batch["row"]).items():
    assert (batch[name] == want).all()
    assert batch[name].dtype == (bool if name == "mask" else np.int32)


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
