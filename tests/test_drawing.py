"""Draft trees and marked answers as text, against hand-written ones."""

import math

import numpy as np
import pytest

from eagle_jax import drawing, text

WORDS = [" the", " sky", " sea", " is", " was", "\n"]


def drawn(nodes, given) -> drawing.Drawn:
  """nodes: (token, parent, probability of the path) after the root, token 0;
  probability None marks an invalid node."""
  tokens, parent, odds = zip((0, 0, 1.0), *nodes, strict=True)
  return drawing.Drawn(
    np.array(tokens),
    np.array(parent),
    np.array([-np.inf if p is None else math.log(p) for p in odds]),
    np.array([p is not None for p in odds]),
    given,
  )


# (1) the docstring's; (2) nothing accepted; (3) a whole path, the likelier
# child drawn first though its node comes later; (4) an invalid node; (5) the
# same token under two parents; (6) no drafts at all.
@pytest.mark.parametrize(
  ("nodes", "given", "path", "lines"),
  [
    (
      [(1, 0, 0.62), (2, 0, 0.11), (3, 1, 0.41)],
      [1, 4],
      [0, 1],
      [
        "' the'",
        "├─ ' sky' 0.62 *",
        "│  └─ ' is' 0.41",
        "└─ ' sea' 0.11",
        "accepted 1 of 3 drafts; then the target's own ' was'",
      ],
    ),
    (
      [(1, 0, 0.5)],
      [5],
      [0],
      [
        "' the'",
        "└─ ' sky' 0.50",
        "accepted 0 of 1 drafts; then the target's own '\\n'",
      ],
    ),
    (
      [(1, 0, 0.3), (2, 0, 0.6), (3, 2, 0.2), (4, 2, 0.4), (5, 4, 0.1)],
      [2, 4, 5, 0],
      [0, 2, 4, 5],
      [
        "' the'",
        "├─ ' sea' 0.60 *",
        "│  ├─ ' was' 0.40 *",
        "│  │  └─ '\\n' 0.10 *",
        "│  └─ ' is' 0.20",
        "└─ ' sky' 0.30",
        "accepted 3 of 5 drafts; then the target's own ' the'",
      ],
    ),
    (
      [(1, 0, 0.9), (3, 0, None)],
      [1, 3],
      [0, 1],
      [
        "' the'",
        "└─ ' sky' 0.90 *",
        "accepted 1 of 1 drafts; then the target's own ' is'",
      ],
    ),
    (
      [(1, 0, 0.6), (2, 0, 0.4), (3, 1, 0.3), (3, 2, 0.2)],
      [2, 3, 0],
      [0, 2, 4],
      [
        "' the'",
        "├─ ' sky' 0.60",
        "│  └─ ' is' 0.30",
        "└─ ' sea' 0.40 *",
        "   └─ ' is' 0.20 *",
        "accepted 2 of 4 drafts; then the target's own ' the'",
      ],
    ),
    (
      [],
      [1],
      [0],
      ["' the'", "accepted 0 of 0 drafts; then the target's own ' sky'"],
    ),
  ],
)
def test_tree(nodes, given, path, lines):
  d = drawn(nodes, given)
  assert d.path() == path
  assert drawing.tree(d, WORDS.__getitem__).split("\n") == lines


@pytest.mark.parametrize(
  ("accept_lengths", "colour", "wanted"),
  [
    ([], False, "a"),
    ([0], False, "ab"),
    ([2, 0, 1], False, "a‹b›‹c›de‹f›g"),
    ([1], True, "a\033[32mb\033[0mc"),
  ],
)
def test_marked(accept_lengths, colour, wanted):
  n = 1 + sum(a + 1 for a in accept_lengths)
  got = drawing.marked(range(n), accept_lengths, "abcdefg".__getitem__, colour)
  assert got == wanted


def test_marked_refuses_lengths_that_do_not_add_up():
  with pytest.raises(ValueError, match=r"shorter|longer"):
    drawing.marked([1, 2, 3], [0], str, False)


def test_tokens_that_are_part_of_a_character_show_bytes():
  """A byte-level and a sentencepiece-like tokenizer, both really tokenising."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers
  from transformers import PreTrainedTokenizerFast

  level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = sorted(level.alphabet())
  made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
  bytewise = PreTrainedTokenizerFast(tokenizer_object=made)
  names = {f"<0x{b:02X}>": b for b in range(256)}
  made = Tokenizer(models.BPE(names, [], byte_fallback=True))
  made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
  fallback = PreTrainedTokenizerFast(tokenizer_object=made)
  for tokenizer in (bytewise, fallback):
    piece = text.piece(tokenizer)
    ids = tokenizer("a’é", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6  # 1 + 3 + 2 bytes
    assert [text.visible(piece(i)) for i in ids] == [
      *("a", r"\xe2", r"\x80", r"\x99", r"\xc3", r"\xa9")
    ]
    assert drawing.marked(ids, [4], piece, False) == "a‹’›‹\\xc3›\\xa9"
    assert drawing.marked(ids, [0] * 5, piece, False) == "a’é"
    d = drawn([(1, 0, 0.5)], [1, 2])
    lines = drawing.tree(d, lambda i, of=piece, to=ids: of(to[i])).split("\n")
    assert lines[1] == r"└─ '\xe2' 0.50 *"
    assert lines[2].endswith(r"the target's own '\x80'")
    assert text.visible(piece(ids[0])) == "a"
  assert text.piece(None)(7) == "7"
