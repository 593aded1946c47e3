"""The transformer against a slow NumPy reference, and against itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import decode, verify, warps
from specjax.models.transformer import Transformer
from specjax.types import Block

CLOSE = dict(rtol=1e-5, atol=1e-5)
SIZE = 24  # of caches and padded chains: few shapes compile


def reference(model, tokens):
  """One chain, position by position, in float64: streams, features, logits."""
  c = model.config
  size, group = c.head_size, c.heads // c.kv_heads
  take = functools.partial(np.asarray, dtype=np.float64)

  def norm(x, scale):
    return x / np.sqrt((x**2).mean() + c.norm_eps) * take(scale[...])

  def turned(head, position):
    # Pair (i, i + size / 2) as a complex number.
    z = head[: size // 2] + 1j * head[size // 2 :]
    i = np.arange(size // 2)
    z = z * np.exp(1j * position / c.rope_theta ** (2 * i / size))
    return np.concatenate([z.real, z.imag])

  xs = [take(model.embedding[...])[t] for t in tokens]
  streams = [np.stack(xs)]
  for layer in model.layers:
    keys, values, after = [], [], []
    for position, x in enumerate(xs):
      heads = take(layer.qkv[...]) @ norm(x, layer.attention_norm)
      heads = heads.reshape(-1, size)
      queries = heads[: c.heads]
      keys.append(
        [
          turned(head, position)
          for head in heads[c.heads : c.heads + c.kv_heads]
        ]
      )
      values.append(heads[c.heads + c.kv_heads :])
      mixed = []
      for h, query in enumerate(queries):
        query, kv = turned(query, position), h // group
        weights = np.exp([query @ key[kv] / np.sqrt(size) for key in keys])
        weights = weights / weights.sum()
        mixed.append(sum(w * v[kv] for w, v in zip(weights, values, strict=1)))
      x = x + take(layer.proj[...]) @ np.concatenate(mixed)
      y = take(layer.gate_up[...]) @ norm(x, layer.hidden_norm)
      gate, up = y[: c.hidden], y[c.hidden :]
      x = x + take(layer.down[...]) @ (gate / (1 + np.exp(-gate)) * up)
      after.append(x)
    xs = after
    streams.append(np.stack(xs))
  features = np.stack([norm(x, model.norm) for x in xs])
  head = model.embedding if c.tied else model.head
  return streams, features, features @ take(head[...]).T


forward = toys.jit(Transformer.forward, static_argnames='taps')
extend = toys.jit(Transformer.extend)
follow = toys.jit(Transformer.follow)
commit = toys.jit(Transformer.commit, static_argnames='chain')


def random_tokens(seed, *shape, vocab=13):
  return np.random.default_rng(seed).integers(0, vocab, shape, np.int32)


def features_of(model, chain):
  """Features of each position of one chain, by a forward pass."""
  tokens = np.zeros((1, SIZE), np.int32)
  tokens[0, : len(chain)] = chain
  segments = (np.arange(SIZE)[None] < len(chain)).astype(np.int32)
  return np.asarray(forward(model, tokens, segments).features[0, : len(chain)])


def filled(model, tokens, length):
  """A cache of `tokens[b, :length[b]]`, fed in blocks of four."""
  cache = model.init_cache(2, SIZE)
  for start in range(0, max(length), 4):
    block = Block(jnp.asarray(tokens[:, start : start + 4]))
    _, rows = extend(model, block, cache)
    keep = np.arange(start, start + 4) < np.asarray(length)[:, None]
    cache = commit(model, cache, rows, keep)
  return cache


@pytest.mark.parametrize(
  'sizes',
  [
    dict(),
    dict(tied=False, kv_heads=4, rope_theta=50.0, norm_eps=0.1),
    dict(kv_heads=1, head_dim=6, layers=3),
  ],
  ids=['grouped', 'untied', 'multi_query'],
)
def test_forward_is_the_reference(sizes):
  model = toys.transformer(**sizes)
  tokens = random_tokens(1, 2, 9)
  taps = (-1, 0, 1)
  output = forward(model, tokens, jnp.ones_like(tokens), taps=taps)
  logits = model.unembed(output.features)
  for row, chain in enumerate(tokens):
    streams, features, want = reference(model, chain)
    np.testing.assert_allclose(output.features[row], features, **CLOSE)
    np.testing.assert_allclose(logits[row], want, **CLOSE)
    for tap, got in zip(taps, output.taps, strict=True):
      np.testing.assert_allclose(got[row], streams[tap + 1], **CLOSE)


def test_features_stand_behind_the_last_norm():
  # No layers: hidden [3, 4], scale [1, 2] and an identity for a head.
  model = toys.transformer(
    vocab_size=2, width=2, layers=0, heads=1, kv_heads=1, tied=False, norm_eps=0
  )
  model.embedding[...] = jnp.array([[3.0, 4.0], [0.0, 1.0]])
  model.norm[...] = jnp.array([1.0, 2.0])
  model.head[...] = jnp.eye(2)
  features = model.forward(jnp.zeros((1, 1), int), jnp.ones((1, 1))).features
  np.testing.assert_allclose(features[0, 0], [0.848528, 2.262742], rtol=1e-6)
  law = jax.nn.softmax(model.unembed(features)[0, 0])
  np.testing.assert_allclose(law, [0.195570, 0.804430], rtol=1e-5)


def test_a_tied_head_is_the_embedding():
  model = toys.transformer(vocab_size=3, width=2, layers=0, heads=1, kv_heads=1)
  model.embedding[...] = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
  assert not hasattr(model, 'head')  # one copy, so that they stay equal
  np.testing.assert_array_equal(
    model.unembed(jnp.array([2.0, 3.0])), [2.0, 3.0, 5.0]
  )


def test_blocks_of_any_size_are_one_forward():
  """Rows keep what they like of each block; the rest leaves no trace."""
  model = toys.transformer()
  tokens = random_tokens(2, 2, 16)
  want = np.stack([features_of(model, row) for row in tokens])
  cache = model.init_cache(2, SIZE)
  at = np.zeros(2, int)
  rng = np.random.default_rng(3)
  for size in [4, 1, 2, 4, 2, 1, 4, 4]:
    kept = np.minimum(rng.integers(0, size + 1, 2), 16 - at)
    index = np.arange(size)
    place = np.minimum(at[:, None] + index, 15)
    right = np.take_along_axis(tokens, place, 1)
    wrong = (right + rng.integers(1, 13, right.shape)) % 13
    keep = index < kept[:, None]
    block = Block(jnp.asarray(np.where(keep, right, wrong), jnp.int32))
    output, rows = extend(model, block, cache)
    cache = commit(model, cache, rows, keep)
    for row in range(2):
      np.testing.assert_allclose(
        output.features[row, : kept[row]],
        want[row, at[row] : at[row] + kept[row]],
        **CLOSE,
      )
    at += kept
    np.testing.assert_array_equal(cache.length, at)
  assert at.min() >= 6 and at[0] != at[1]


def test_positions_go_on_from_what_was_kept():
  """Prompts of 10 and 3 in one batch, two drafts accepted, then a correction.

  Row 0: 9 tokens are cached and the tenth is pending; row 1: 2 and the third.
  """
  model = toys.transformer()
  tokens = random_tokens(4, 2, 16)
  prompt = np.array([10, 3])
  after = prompt + 3
  cache = filled(model, tokens, prompt - 1)

  def block(size, start):
    return Block(
      jnp.stack([t[s : s + size] for t, s in zip(tokens, start, strict=True)])
    )

  _, rows = extend(model, block(4, prompt - 1), cache)
  keep = np.broadcast_to([True, True, True, False], (2, 4))
  cache = commit(model, cache, rows, keep)
  np.testing.assert_array_equal(cache.length, [12, 5])

  output, rows = extend(model, block(1, after - 1), cache)
  cache = commit(model, cache, rows, np.ones((2, 1), bool))
  for row in range(2):
    alone = tokens[row, : after[row]]
    np.testing.assert_allclose(
      output.features[row, 0], features_of(model, alone)[-1], **CLOSE
    )
  # A key holds its position, so equal keys were fed at equal positions.
  scratch = filled(model, tokens, after)
  live = np.arange(SIZE) < after[:, None]
  for got, want in zip(
    jax.tree.leaves(cache.rows), jax.tree.leaves(scratch.rows), strict=True
  ):
    np.testing.assert_allclose(
      np.where(live[:, None, :, None], got, 0),
      np.where(live[:, None, :, None], want, 0),
      **CLOSE,
    )


def test_a_chain_node_by_node_is_the_block():
  """Whatever the rows hold of nodes that are yet to come."""
  model = toys.transformer()
  tokens = random_tokens(9, 2, 12)
  cache = filled(model, tokens, np.array([8, 3]))
  block = Block(jnp.asarray(random_tokens(10, 2, 4)))
  whole, want = extend(model, block, cache)
  rows = jax.tree.map(lambda x: jnp.full_like(x, 7.0), want)
  for at in range(4):
    node = block.tokens[:, at : at + 1]
    output, rows = follow(model, node, cache, rows, at)
    np.testing.assert_allclose(
      output.features[:, 0], whole.features[:, at], **CLOSE
    )
  for got, right in zip(
    jax.tree.leaves(rows), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(got, right, **CLOSE)


def test_some_layers_are_a_model_that_shares_its_weights():
  model = toys.transformer(layers=3)
  tokens = random_tokens(11, 2, 6)
  segments = np.ones_like(tokens)
  output = forward(model, tokens, segments, taps=(1,))
  square = jnp.mean(output.taps[0] ** 2, -1, keepdims=True)
  first = model.subset(range(2))
  np.testing.assert_allclose(
    forward(first, tokens, segments).features,
    output.taps[0] / jnp.sqrt(square + 1e-5) * model.norm[...],
    **CLOSE,
  )
  turned = model.subset((2, 0))
  assert turned.config.layers == len(turned.layers) == 2
  for layer, own in zip(turned.layers, (2, 0), strict=True):
    shared = zip(
      jax.tree.leaves(layer), jax.tree.leaves(model.layers[own]), strict=True
    )
    assert all(a is b for a, b in shared)
  for layers in ((), (3,), (-1,)):
    with pytest.raises(ValueError, match='give at least one of 0 to 2'):
      model.subset(layers)


def test_what_lies_above_the_length_is_not_read():
  # Scratch is finite, as is everything that finite weights produce; a weight
  # of zero times NaN would be NaN.
  model = toys.transformer()
  tokens = jnp.asarray(random_tokens(5, 2, 4))
  clean = filled(model, tokens, [3, 1])
  live = np.arange(SIZE) < np.array([[3], [1]])
  dirty = clean._replace(
    rows=jax.tree.map(
      lambda r: jnp.where(live[:, None, :, None], r, 1e30), clean.rows
    )
  )
  want, _ = extend(model, Block(tokens), clean)
  got, _ = extend(model, Block(tokens), dirty)
  np.testing.assert_array_equal(got.features, want.features)


# Node 0 is pending; a tree for each row, parents first.
PARENTS = np.array(
  [
    [-1, 0, 0, 1, 1, 2, 5],
    [-1, 0, 1, 0, 3, 3, 4],
  ]
)


def path_to(parents, node):
  path = []
  while node >= 0:
    path.append(node)
    node = parents[node]
  return path[::-1]


def test_a_tree_is_each_of_its_paths():
  model = toys.transformer()
  context = random_tokens(6, 2, 4)
  length = np.array([4, 2])
  nodes = random_tokens(7, 2, 7)
  cache = filled(model, context, length)
  block = Block(jnp.asarray(nodes), jnp.asarray(PARENTS))
  output, rows = extend(model, block, cache)
  for row in range(2):
    for node in range(7):
      path = path_to(PARENTS[row], node)
      chain = np.concatenate([context[row, : length[row]], nodes[row, path]])
      np.testing.assert_allclose(
        output.features[row, node], features_of(model, chain)[-1], **CLOSE
      )

  # Keep a path that is no prefix of the block; it is then a plain context.
  ends = [6, 4]
  kept = np.zeros((2, 7), bool)
  for row, end in enumerate(ends):
    kept[row, path_to(PARENTS[row], end)] = True
  cache = commit(model, cache, rows, kept, chain=False)
  np.testing.assert_array_equal(cache.length, length + [4, 3])
  more = random_tokens(8, 2, 4)
  output, _ = extend(model, Block(jnp.asarray(more)), cache)
  for row, end in enumerate(ends):
    chain = np.concatenate(
      [
        context[row, : length[row]],
        nodes[row, path_to(PARENTS[row], end)],
        more[row],
      ]
    )
    np.testing.assert_allclose(
      output.features[row], features_of(model, chain)[-4:], **CLOSE
    )


def influence(model, segments):
  """`[T, T]` bool: does feature t depend on the embedding at s at all?"""
  tokens = jnp.arange(len(segments))[None]
  probe = jnp.arange(1.0, model.config.width + 1)

  def features(model):
    output = model.forward(tokens, jnp.asarray(segments)[None])
    return output.features[0] @ probe

  gradients = toys.jit(jax.jacrev(features))(model).embedding[...]
  return np.asarray(gradients != 0).any(-1)[:, : len(segments)]


@pytest.mark.parametrize(
  'segments, allowed',
  [
    ([1] * 6, np.tri(6)),
    (
      [1, 1, 1, 2, 2, 0],
      [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
      ],
    ),
  ],
  ids=['one', 'packed'],
)
def test_nothing_crosses_time_or_documents(segments, allowed):
  """Gradients are exactly zero where nothing may flow, and only there."""
  model = toys.transformer(tied=False)
  np.testing.assert_array_equal(
    influence(model, segments), np.asarray(allowed, bool)
  )


def test_packed_documents_are_separate_ones():
  model = toys.transformer()
  tokens = random_tokens(9, 1, SIZE)
  segments = np.zeros((1, SIZE), np.int32)
  segments[0, :5] = [1, 1, 1, 2, 2]
  packed = forward(model, tokens, segments).features[0]
  np.testing.assert_allclose(
    packed[:3], features_of(model, tokens[0, :3]), **CLOSE
  )
  np.testing.assert_allclose(
    packed[3:5], features_of(model, tokens[0, 3:5]), **CLOSE
  )
  other = tokens.copy()
  other[:, :3] = (tokens[:, :3] + 1) % 13
  changed = forward(model, other, segments).features[0]
  np.testing.assert_array_equal(changed[3:5], packed[3:5])
  assert (np.abs(changed[:3] - packed[:3]).max(-1) > 1e-3).all()
  assert np.isfinite(packed).all()


def test_a_row_of_a_batch_is_that_row_alone():
  model = toys.transformer()
  lengths = [5, 3, 7]
  chains = [random_tokens(10 + n, n) for n in lengths]
  alone = [features_of(model, chain) for chain in chains]
  for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1]):
    tokens, segments = np.zeros((2, 3, 7), np.int32)
    for row, i in enumerate(order):
      tokens[row, : lengths[i]] = chains[i]
      segments[row, : lengths[i]] = 1
    features = forward(model, tokens, segments).features
    for row, i in enumerate(order):
      np.testing.assert_allclose(features[row, : lengths[i]], alone[i], **CLOSE)


def test_a_cast_model_is_one_of_that_dtype():
  whole, halved = toys.transformer(), toys.transformer(dtype='bfloat16')
  cast = whole.cast('bfloat16')
  assert cast.config == halved.config
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a, b, strict=True),
    jax.tree.leaves(cast),
    jax.tree.leaves(halved),
  )
  assert jax.tree.leaves(cast)[0] is not jax.tree.leaves(whole)[0]


def test_bfloat16_weights_and_caches_but_float32_sums():
  model = toys.transformer(dtype='bfloat16', tied=False)
  for layer in model.layers:
    assert layer.qkv.dtype == layer.down.dtype == jnp.bfloat16
  tokens = jnp.asarray(random_tokens(14, 2, 4))
  cache = model.init_cache(2, SIZE)
  output, rows = extend(model, Block(tokens), cache)
  cache = commit(model, cache, rows, np.ones((2, 4), bool))
  for leaf in jax.tree.leaves((rows, cache.rows)):
    assert leaf.dtype == jnp.bfloat16
  assert output.features.shape == (2, 4, 16)
  assert output.features.dtype == jnp.float32
  logits = model.unembed(output.features)
  assert logits.shape == (2, 4, 13) and logits.dtype == jnp.float32
  assert model.embed(tokens).dtype == jnp.float32
  # Near the same weights in float32, and not a cruder sum than that.
  for row in range(2):
    want = reference(model, tokens[row])[-1]
    np.testing.assert_allclose(logits[row], want, atol=0.1)


@pytest.mark.parametrize(
  'sizes, message',
  [
    (dict(heads=4, kv_heads=3), '4 heads cannot share 3 kv_heads'),
    (dict(width=10, heads=4), 'width 10 does not divide into 4 heads'),
    (dict(width=12, heads=4), 'heads of width 3 cannot be rotated'),
    (dict(head_dim=5), 'heads of width 5 cannot be rotated'),
    (dict(dtype='float16'), "dtype is 'float16': use 'float32' or 'bfloat16'"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    toys.transformer(**sizes)


def decoded(model, drafter, state):
  """Greedily, to the end; compiled once for each draft length."""
  end = jnp.zeros(0, jnp.int32)
  args = model, drafter, verify.rejection, warps.Greedy(), end, state, 99
  return advance(*args)


advance = toys.jit(decode.advance, static_argnums=2)


@pytest.fixture(scope='module')
def plain(request):
  """A model, where it starts from, and its greedy continuation."""
  model = toys.transformer(vocab_size=61, dtype=request.param)
  tokens = np.zeros((2, 64), np.int32)
  tokens[:, :5] = random_tokens(20, 2, 5, vocab=61)
  length = jnp.array([5, 1])
  state = toys.jit(decode.prefill)(
    model,
    toys.Scripted(tokens, tokens, 4, 61),
    tokens,
    length,
    length + 50,
    length,
    jax.random.split(jax.random.key(0), 2),
  )
  return model, state, decoded(model, specjax.NoDrafter(), state)


@pytest.mark.parametrize(
  ('plain', 'k'),
  [
    pytest.param('float32', 1, marks=pytest.mark.slow),
    ('float32', 2),
    pytest.param('float32', 3, marks=pytest.mark.slow),
    ('float32', 4),
    pytest.param('bfloat16', 4, marks=pytest.mark.slow),
  ],
  indirect=['plain'],
)
def test_greedy_speculation_is_plain_up_to_ties(plain, k):
  """A block and a token sum in another order: near-ties alone may flip."""
  model, state, want = plain
  text = np.asarray(want.tokens)
  wrong = np.random.default_rng(k).random(text.shape) < 0.25
  got = decoded(model, toys.Scripted(text, wrong, k, 61), state)
  np.testing.assert_array_equal(got.length, want.length)
  for row in range(2):
    differ = np.flatnonzero(np.asarray(got.tokens[row]) != text[row])
    if differ.size:
      margin, tie = toys.top_two_margin(model, text[row], differ[0])
      assert margin < tie, f'row {row} differs at {differ[0]}: {margin}'
    else:  # and there was something to accept and to reject
      assert 0 < got.stats.accepted[row] < got.stats.drafted[row]
