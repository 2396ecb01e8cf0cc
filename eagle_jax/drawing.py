"""A draft tree, and which tokens were drafted, as text for a terminal."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from eagle_jax import text
from eagle_jax.speculation.state import ChunkOut
from eagle_jax.speculation.tree import Tree


@dataclasses.dataclass(frozen=True)
class Drawn:
  """One row's draft tree and the tokens the target gave: all numpy.

  tokens, parent, scores, valid: [M]. given: the target's tokens of the cycle,
  accepted drafts first, the bonus token last.
  """

  tokens: np.ndarray
  parent: np.ndarray
  scores: np.ndarray
  valid: np.ndarray
  given: Sequence[int]

  def path(self) -> list[int]:
    """Nodes on the accepted path, the root first."""
    node, nodes = 0, [0]
    for token in self.given[:-1]:
      below = (
        i
        for i in range(1, len(self.tokens))
        if self.parent[i] == node and self.tokens[i] == token and self.valid[i]
      )
      # The tree to look at is grown by a program of its own; rounding may
      # drop a node that the decoding program kept.
      node = next(below, None)
      if node is None:
        break
      nodes.append(node)
    return nodes


def of_cycle(tree: Tree, out: ChunkOut) -> Drawn:
  """The first row of what `Engine.generate` shows to `watch_trees`."""
  return Drawn(
    tree.tokens[0],
    tree.parent[0],
    tree.scores[0],
    tree.valid[0],
    out.tokens[0, : out.count[0]].tolist(),
  )


def _quoted(text: str) -> str:
  """repr, with bytes that are no whole character as \\xNN.

  "…" whole: '…'; its first two bytes: '\\xe2\\x80'.
  """
  return re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", repr(text))


def tree(drawn: Drawn, piece: Callable[[int], str]) -> str:
  """The tree, a node a line; accepted nodes are marked with *.

  ' the'
  ├─ ' sky' 0.62 *
  │  └─ ' is' 0.41
  └─ ' sea' 0.11
  accepted 1 of 3 drafts; then the target's own ' was'

  The number is the drafter's probability of the path so far.

  Args:
    piece: token id -> text (`text.piece`).
  """
  accepted = set(drawn.path())
  children: dict[int, list[int]] = {}
  for i in range(1, len(drawn.tokens)):
    if drawn.valid[i]:
      children.setdefault(int(drawn.parent[i]), []).append(i)
  lines = [_quoted(piece(int(drawn.tokens[0])))]

  def below(node: int, indent: str) -> None:
    found = sorted(children.get(node, []), key=lambda i: -drawn.scores[i])
    for i in found:
      last = i == found[-1]
      mark = " *" if i in accepted else ""
      lines.append(
        f"{indent}{'└─' if last else '├─'} "
        f"{_quoted(piece(int(drawn.tokens[i])))}"
        f" {math.exp(drawn.scores[i]):.2f}{mark}"
      )
      below(i, indent + ("   " if last else "│  "))

  below(0, "")
  bonus = _quoted(piece(int(drawn.given[-1])))
  lines.append(
    f"accepted {len(drawn.given) - 1} of {int(drawn.valid.sum()) - 1} drafts;"
    f" then the target's own {bonus}"
  )
  return "\n".join(lines)


def marked(
  ids: Sequence[int],
  accept_lengths: Sequence[int],
  piece: Callable[[int], str],
  colour: bool,
) -> str:
  """The answer with its accepted drafts marked: green, or in ‹›.

  The first token is prefill's; each cycle then gives its accepted drafts and
  one token of the target's own. Tokens that make up one character are shown
  together where they have one mark, else as bytes.
  """
  drafted = [False]
  for a in accept_lengths:
    drafted += [True] * a + [False]
  on, off = ("\033[32m", "\033[0m") if colour else ("‹", "›")
  shown: list[tuple[str, bool]] = []
  for i, d in zip(ids, drafted, strict=True):
    new = piece(i)
    if (
      shown and shown[-1][1] == d and text.visible(shown[-1][0]) != shown[-1][0]
    ):
      joined = shown[-1][0] + new
      raw = joined.encode("utf-8", "surrogateescape")
      shown[-1] = (raw.decode("utf-8", "surrogateescape"), d)
    else:
      shown.append((new, d))
  return "".join(
    f"{on}{text.visible(t)}{off}" if d else text.visible(t) for t, d in shown
  )
