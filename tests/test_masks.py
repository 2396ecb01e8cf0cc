"""Every mask that the docstring of `masks` draws, and what it leaves out."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models import masks


def drawn(*lines: str) -> np.ndarray:
  """A picture, a row a line: 1 is seen, . or 0 is not."""
  return np.array([[c == "1" for c in line if c != " "] for line in lines])


TREE = ("1 . . .", "1 1 . .", "1 . 1 .", "1 1 . 1")


@pytest.mark.parametrize(
  ("own", "T", "picture"),
  [
    (masks.Causal(), 3, ("1 . .", "1 1 .", "1 1 1")),
    (masks.Tree(jnp.asarray(drawn(*TREE)[None])), 4, TREE),
  ],
)
def test_own_block_is_the_picture(own, T, picture):
  positions = jnp.arange(2, 2 + T)[None]
  got = masks.block_mask(own, positions, None)
  np.testing.assert_array_equal(got[0], drawn(*picture))


def test_earlier_block_is_the_picture():
  """Draft level 2: each row sees its own parent among the earlier rows."""
  parents = drawn("1 .", ". 1")
  attend = masks.Attend(
    own=masks.Itself(), earlier=masks.Tree(jnp.asarray(parents[None]))
  )
  got = masks.block_mask(attend.earlier, jnp.array([[4, 4]]), None)
  np.testing.assert_array_equal(got[0], parents)


def test_prefix_is_the_picture():
  """2 of 3 slots committed, and another length in the next batch row."""
  attend = masks.Attend(own=masks.Causal(), length=jnp.array([2, 0]))
  got = masks.prefix_mask(attend, jnp.array([[2, 3, 4], [0, 1, 2]]), 3)
  got = np.broadcast_to(got, (2, 3, 3))
  np.testing.assert_array_equal(got[0], drawn("1 1 0", "1 1 0", "1 1 0"))
  assert not got[1].any()


def test_documents_do_not_see_each_other():
  """Equal ids are one document, also where the ids are not ascending."""
  own = masks.Causal(jnp.array([[7, 7, 2, 2], [1, 3, 3, 3]]))
  positions = jnp.array([[0, 1, 0, 1], [0, 0, 1, 2]])
  got = masks.block_mask(own, positions, None)
  np.testing.assert_array_equal(
    got[0], drawn("1 . . .", "1 1 . .", ". . 1 .", ". . 1 1")
  )
  np.testing.assert_array_equal(
    got[1], drawn("1 . . .", ". 1 . .", ". 1 1 .", ". 1 1 1")
  )


def test_window_counts_positions_in_the_own_block():
  """Rows at positions 0 1 5 6: the gap is farther than the window of 3."""
  got = masks.block_mask(masks.Causal(), jnp.array([[0, 1, 5, 6]]), 3)
  np.testing.assert_array_equal(
    got[0], drawn("1 . . .", "1 1 . .", ". . 1 .", ". . 1 1")
  )


def test_window_of_w_sees_w_keys_itself_included():
  got = masks.block_mask(masks.Causal(), jnp.arange(6)[None], 3)
  np.testing.assert_array_equal(np.asarray(got[0]).sum(1), [1, 2, 3, 3, 3, 3])


def test_window_counts_from_the_keys_in_the_earlier_block():
  """Queries one and two unrolled steps on see what decoding leaves in the
  window: the positions between are those of later steps' rows."""
  rows = jnp.arange(5)[None]
  earlier = masks.Causal(positions=rows)
  for step in (1, 2):
    got = np.asarray(masks.block_mask(earlier, rows + step, 3)[0])
    for query in range(5):
      for key in range(5):
        want = key <= query and query + step - key < 3
        assert got[query, key] == want


def test_window_counts_positions_in_the_prefix():
  """Two queries of one call at different distances, as in a tree: the root
  at 6 and its child at 7; the cache holds 0..5."""
  attend = masks.Attend(own=masks.Causal(), length=jnp.array([6]), window=4)
  got = masks.prefix_mask(attend, jnp.array([[6, 7]]), 8)
  np.testing.assert_array_equal(
    got[0], drawn(". . . 1 1 1 . .", ". . . . 1 1 . .")
  )


def test_some_rows_as_queries_see_what_they_saw():
  """Against the whole mask, row by row."""
  positions = jnp.asarray([[0, 1, 2, 3], [5, 6, 7, 8]])
  documents = jnp.asarray([[1, 1, 2, 2], [1, 1, 1, 1]])
  wanted = jnp.asarray([[3, 1], [0, 2]])
  for own in (masks.Causal(), masks.Causal(documents)):
    for window in (None, 2):
      attend = masks.Attend(own=own, window=window)
      whole = masks.block_mask(own, positions, window)
      whole = np.broadcast_to(whole, (2, 4, 4))
      some = masks.for_queries(attend, positions, wanted)
      got = masks.block_mask(some.own, positions, window)
      for b in range(2):
        for i, row in enumerate(wanted[b]):
          assert got[b, i].tolist() == whole[b, row].tolist()
  for other in (
    masks.Attend(own=masks.Itself()),
    masks.Attend(own=masks.Causal(), earlier=masks.Causal()),
  ):
    with pytest.raises(ValueError, match="own rows, no others"):
      masks.for_queries(other, positions, wanted)
