"""Trees against a walk in plain Python."""

import hypothesis
import numpy as np
import toys
from hypothesis import strategies

from specjax import trees

M = 7
ancestors = toys.jit(trees.ancestors, static_argnums=1)
pack = toys.jit(trees.pack)
merge = toys.jit(trees.merge)

# Any tree, parents before children.
parent_lists = strategies.tuples(
  *[strategies.integers(-1 if i == 0 else 0, max(i - 1, -1)) for i in range(M)]
)


def path(parents, node):
  while node >= 0:
    yield node
    node = parents[node]


@hypothesis.given(parent_lists, parent_lists)
def test_a_node_sees_its_path_and_nothing_else(first, second):
  parents = np.array([first, second], np.int32)
  seen = ancestors(parents, M)
  for row in range(2):
    for node in range(M):
      want = np.isin(np.arange(M), list(path(parents[row], node)))
      np.testing.assert_array_equal(seen[row, node], want)
  np.testing.assert_array_equal(
    trees.depths(seen),
    [[len(list(path(row, i))) - 1 for i in range(M)] for row in parents],
  )


def test_a_chain_is_the_tree_with_one_branch():
  chain = np.arange(M, dtype=np.int32)[None] - 1
  np.testing.assert_array_equal(ancestors(None, M), ancestors(chain, M))
  np.testing.assert_array_equal(ancestors(None, M)[0], np.tri(M))


def test_nodes_may_share_a_depth_with_no_common_branch():
  # Several pending tokens: -1 more than once.
  seen = ancestors(np.array([[-1, -1, 0, 1, 3, 3, 2]]), M)
  np.testing.assert_array_equal(trees.depths(seen), [[0, 0, 1, 1, 2, 2, 2]])
  np.testing.assert_array_equal(seen[0, 6], [1, 0, 1, 0, 0, 0, 1])


@hypothesis.given(
  strategies.lists(strategies.booleans(), min_size=M, max_size=M)
)
def test_kept_nodes_come_first_in_their_order(kept):
  order = np.asarray(pack(np.array([kept, kept[::-1]])))
  for row, flags in zip(order, (kept, kept[::-1]), strict=True):
    wanted = np.flatnonzero(flags)
    np.testing.assert_array_equal(row[: wanted.size], wanted)
    np.testing.assert_array_equal(np.sort(row), np.arange(M))


def merged(tokens, parents, valid):
  """By a dictionary of who came first below a node with a token."""
  first, moved = {}, []
  place = {-1: -1}  # where what hangs off each node goes
  for i, parent in enumerate(parents):
    above = place[parent]
    moved.append(above)
    place[i] = i
    if valid[i]:
      place[i] = first.setdefault((above, tokens[i]), i)
  return moved


@hypothesis.given(
  parents=parent_lists,
  tokens=strategies.lists(strategies.integers(0, 2), min_size=M, max_size=M),
  valid=strategies.lists(strategies.booleans(), min_size=M, max_size=M),
)
def test_equal_siblings_share_what_hangs_off_them(parents, tokens, valid):
  for i, parent in enumerate(parents):
    valid[i] &= parent < 0 or valid[parent]
  arrays = [np.array([x]) for x in (tokens, parents, valid)]
  got = np.asarray(merge(*arrays))[0].tolist()
  assert got == merged(tokens, parents, valid)
  # Every text stays where it was, and behind a valid node only one begins so.
  texts = [
    [[tokens[j] for j in path(row, i)] for i in range(M)]
    for row in (parents, got)
  ]
  assert texts[0] == texts[1]
  inner = [i for i in range(M) if valid[i] and i in got]
  assert len({tuple(texts[1][i]) for i in inner}) == len(inner)
  # Once is enough.
  again = merge(arrays[0], np.array([got]), arrays[2])
  assert np.asarray(again)[0].tolist() == got


def test_without_equal_siblings_nothing_is_merged():
  parents = np.array([[-1, -1, 0, 0, 1, 1, 2]], np.int32)
  tokens = np.array([[0, 1, 0, 1, 0, 1, 0]])
  np.testing.assert_array_equal(merge(tokens, parents), parents)
