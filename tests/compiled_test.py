"""What XLA makes of a round: no copies, no sorts, and little but the models."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
import toys

from specjax import cache as caches
from specjax import (
  decode,
  draft_length,
  draws,
  generation,
  products,
  verify,
  warps,
  weights,
)
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.models.transformer import Transformer

V = 61  # no other size in these programs
# A head of 22: no pass over a few tokens has scores of as many elements.
SIZES = dict(vocab_size=V, width=8, heads=4, kv_heads=2, head_dim=22, hidden=10)
INSTRUCTION = re.compile(r'%\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(')
BRACKETS = re.compile(r'\[([\d,]*)\]')
# What passes a buffer on, or changes a part of it in place.
IN_PLACE = {
  'parameter',
  'get-tuple-element',
  'bitcast',
  'dynamic-update-slice',
  'fusion',  # whose parts are listed too
}


def converted(text, state):
  """Whether a bfloat16 buffer of the cache is made float32, or from it."""
  sizes = {math.prod(leaf.shape) for leaf in jax.tree.leaves(state.cache.rows)}
  found = re.findall(r'%\S+ = (?:f32|bf16)\[([\d,]*)\]\S* convert\(', text)
  return any(math.prod(map(int, x.split(','))) in sizes for x in found if x)


class Hasty(Transformer):
  """A model whose rows are ready before its attention has read the cache."""

  def extend(self, block, cache, taps=()):
    size = block.tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(size)
    visible = jnp.tril(jnp.ones((1, size, size), bool))
    return self._run(block.tokens, positions, visible, cache, taps)


def arguments(target, drafter, batch, controller=draft_length.FIXED):
  """Of prefill, as shapes."""
  length = jax.ShapeDtypeStruct((batch,), jnp.int32)
  tokens = jax.ShapeDtypeStruct((batch, 64), jnp.int32)
  row = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
  return target, drafter, tokens, length, length, length, row, controller


def advance_program(
  target,
  drafter,
  batch,
  controller=draft_length.FIXED,
  rule=verify.rejection,
):
  """The compiled text of the shipped loop, and its state as shapes."""
  given = arguments(target, drafter, batch, controller)
  state = jax.eval_shape(decode.prefill, *given)
  eos = jax.ShapeDtypeStruct((1,), jnp.int32)
  rule = verify.as_pytree(rule)
  lowered = generation.advance.lower(
    target, drafter, rule, warps.UNCHANGED, eos, state, 9, controller
  )
  return lowered.compile(toys.QUICK).as_text(), state


def instructions(text):
  """Yields the shape and the name of each instruction with one result."""
  for found in INSTRUCTION.finditer(text):
    yield tuple(int(n) for n in found[1].split(',') if n), found[2]


def sorts(text, size):
  """Sorts over an axis of so many elements, whatever they return."""
  found = re.findall(r'= ([^=]*?) sort\(', text)
  return [
    results
    for results in found
    if any(f'{size}' in dims.split(',') for dims in BRACKETS.findall(results))
  ]


def copies(text, state):
  """Names of instructions that write every element of a cache buffer."""
  buffers = {
    (math.prod(leaf.shape), leaf.shape[2])
    for leaf in jax.tree.leaves((state.cache, state.memory))
    # Not the rows of a tree's nodes, which are few.
    if leaf.ndim == 4 and leaf.shape[2] > 64
  }
  return {
    name
    for shape, name in instructions(text)
    for elements, length in buffers
    if math.prod(shape) == elements and length in shape
  } - IN_PLACE


@pytest.mark.parametrize('batch', [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  'name',
  [
    'none',
    'model',
    'ngram',
    pytest.param('distinct', marks=pytest.mark.slow),
  ],
)
def test_the_loop_copies_no_cache_and_sorts_nothing(name, batch):
  draft = toys.transformer(**{**SIZES, 'layers': 1, 'width': 6})
  drafter = {
    'none': NoDrafter(),
    'model': ModelDrafter(draft, 4),
    'ngram': NGram(4),
    'distinct': TreeDrafter(draft, 2, branching=(2, 2)),
  }[name]
  text, state = advance_program(toys.transformer(**SIZES), drafter, batch)
  assert ' while(' in text and 'dynamic-update-slice' in text
  # Not even on entry, for the state is donated.
  assert not copies(text, state)
  names = {name for _, name in instructions(text)}
  assert 'sort' not in names and not sorts(text, V)
  # The first few of all tokens take no sort either.
  assert ('topk' in text.lower()) == (name == 'distinct')


@pytest.mark.parametrize('batch', [1, 3])
def test_the_loop_converts_no_bfloat16_cache(monkeypatch, batch):
  """As it would for every row that is written: all rows, there and back."""
  target = toys.transformer(dtype='bfloat16', **SIZES)
  assert not converted(*advance_program(target, NGram(4), batch))
  jax.clear_caches()
  monkeypatch.setattr(caches, '_bits', lambda x: x)
  on_cpu = jax.default_backend() == 'cpu'
  assert converted(*advance_program(target, NGram(4), batch)) == on_cpu
  jax.clear_caches()


@pytest.mark.parametrize('size', [V, 5000])  # longer ones add by slices
def test_warps_and_draws_sort_nothing(size):
  logits = jax.ShapeDtypeStruct((2, size), jnp.float32)
  warp = warps.compose(
    warps.Temperature(0.8), warps.TopK(20), warps.TopP(0.9), warps.MinP(0.05)
  )

  def draw(logits):
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.vmap(draws.inverse_cdf)(keys, jax.nn.log_softmax(warp(logits)))

  def compiled(function):
    return jax.jit(function).lower(logits).compile(toys.QUICK).as_text()

  assert not sorts(compiled(draw), size)
  # What would be found: sorts of one result and of two.
  assert sorts(compiled(jnp.sort), size)
  assert sorts(compiled(jnp.argsort), size)


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize(
  ('name', 'kind'),
  [('fallback', 'model'), ('confidence', 'model'), ('fallback', 'heads')],
)
@pytest.mark.slow
def test_a_ladder_of_draft_lengths_copies_no_cache_either(name, kind, batch):
  drafter = toys.heads(SIZES['width'], 4)
  if kind == 'model':
    draft = toys.transformer(**{**SIZES, 'layers': 1, 'width': 6})
    drafter = ModelDrafter(draft, 4)
  controller = draft_length.find(name, 4)
  target = toys.transformer(**SIZES)
  text, state = advance_program(target, drafter, batch, controller)
  branches = re.findall(r'branch_computations=\{([^}]*)\}', text)
  assert max(found.count('%') for found in branches) == len(controller.rungs)
  assert not copies(text, state)


class Writing(Transformer):
  """A model that writes its cache within the pass."""

  def extend(self, block, cache, taps=()):
    output, rows = super().extend(block, cache, taps)
    full = jnp.ones(block.tokens.shape, bool)
    return output, self.commit(cache, rows, full)

  def commit(self, cache, rows, kept, chain=True):
    if isinstance(rows, caches.Cache):
      return rows._replace(length=cache.length + kept.sum(-1))
    return super().commit(cache, rows, kept, chain)


@pytest.mark.slow
def test_a_switch_that_passes_the_cache_on_would_be_seen():
  drafter = ModelDrafter(toys.transformer(**{**SIZES, 'layers': 1}), 4)
  controller = draft_length.find('fallback', 4)
  target = toys.transformer(cls=Writing, **SIZES)
  text, state = advance_program(target, drafter, 1, controller)
  assert 'copy' in copies(text, state)


def test_a_copy_of_the_cache_would_be_seen():
  target = toys.transformer(cls=Hasty, **SIZES)
  text, state = advance_program(target, NoDrafter(), 1)
  assert 'copy' in copies(text, state)


def test_a_sort_would_be_seen():
  text = jax.jit(jnp.sort).lower(jnp.zeros((3, V))).compile().as_text()
  assert 'sort' in {name for _, name in instructions(text)}


@pytest.mark.parametrize(
  ('rule', 'reads'), [('rejection', True), ('typical', False)]
)
def test_laws_of_drafts_are_made_for_rules_that_read_them(rule, reads):
  target, draft = (toys.transformer(i, **SIZES) for i in range(2))
  drafter = ModelDrafter(draft, 3)
  text, _ = advance_program(target, drafter, 2, rule=verify.find(rule))
  laws = [x for x, _ in instructions(text) if x == (2, 3, V)]
  assert bool(laws) == reads


def weights_made(text, model):
  """Instructions that write an array of a weight's shape, however it lies."""
  shapes = {leaf.shape for leaf in jax.tree.leaves(model) if leaf.ndim == 2}
  shapes |= {shape[::-1] for shape in shapes}
  return {
    (shape, name)
    for shape, name in instructions(materialized(text))
    if shape in shapes and name not in IN_PLACE
  }


def materialized(text):
  """The instructions whose results are arrays: of a fusion, its last."""
  fused = set(re.findall(r'calls=(%[\w.-]+)', text))
  kept, within = [], None
  for line in text.splitlines():
    if line.startswith(('%', 'ENTRY ')):
      within = line.split()[0]
    if within not in fused or line.lstrip().startswith('ROOT '):
      kept.append(line)
  return '\n'.join(kept)


@pytest.mark.parametrize(
  ('batch', 'dtype'),
  [
    (1, 'bfloat16'),
    pytest.param(1, 'float32', marks=pytest.mark.slow),
    pytest.param(3, 'bfloat16', marks=pytest.mark.slow),
    pytest.param(3, 'float32', marks=pytest.mark.slow),
  ],
)
def test_weights_are_read_as_they_lie(batch, dtype):
  """One that is transposed or converted first is so in every call."""
  target = toys.transformer(dtype=dtype, **SIZES)
  draft = toys.transformer(1, dtype=dtype, **SIZES)
  for drafter in NoDrafter(), NGram(1), NGram(4), ModelDrafter(draft, 3):
    text, _ = advance_program(target, drafter, batch)
    assert not weights_made(text, target), drafter
  given = arguments(target, drafter, batch)
  text = jax.jit(decode.prefill).lower(*given).compile(toys.QUICK).as_text()
  assert not weights_made(text, target)


def test_a_weight_that_is_made_again_would_be_seen():
  target = toys.transformer(dtype='bfloat16', **SIZES)

  @jax.jit
  def loop(target, x, ids, step):
    return jax.lax.fori_loop(0, 9, lambda i, x: step(target, x, ids + i), x)

  def found(step):
    x, ids = jnp.zeros((1, 5, SIZES['width'])), jnp.zeros((1, 5), int)
    lowered = loop.lower(target, x, ids, jax.tree_util.Partial(step))
    return weights_made(lowered.compile(toys.QUICK).as_text(), target)

  def looked_up(model, x, ids):
    return x + model.embedding[...][ids].astype('float32')

  def multiplied(model, x, ids):
    weight = model.layers[0].proj[...]
    mixed = jnp.tile(x, 11).astype(weight.dtype)
    return jnp.einsum('bti,oi->bto', mixed, weight).astype('float32')

  # Of what stands behind a fusion's own instructions too.
  text = """%f (p: f32[61,8]) -> f32[8] {
  %made = f32[61,8]{1,0} convert(%p)
  ROOT %r = f32[8]{0} reduce(%made)
}
ENTRY %main (p: f32[61,8]) -> f32[8] {
  %m = f32[61,8]{1,0} copy(%p)
  ROOT %r = f32[8]{0} fusion(%m), kind=kLoop, calls=%f
}"""
  assert weights_made(text, target) == {((61, 8), 'copy')}
  assert not found(lambda model, x, ids: x + model.embed(ids))
  assert found(looked_up) and found(multiplied)


def without_a_reversal(flat, tiles):
  """What `weights` does for several rows, where they come as they are."""
  found = (tiles[:, None] * flat[:, :, None]).sum(2)
  return found.transpose(1, 0, 2).reshape(len(flat), -1)


@pytest.mark.parametrize('block', [1, 5, 9])
def test_packed_weights_are_multiplied_by_the_library(monkeypatch, block):
  """Each in a call that reads them as they lie, and only multiplies."""
  if not products.on_cpu():
    return  # nothing is packed there
  sizes = dict(vocab_size=320, width=128, heads=4, kv_heads=2, hidden=96)
  target = weights.pack(toys.transformer(layers=2, **sizes), 1)
  tiled = {leaf.shape for leaf in jax.tree.leaves(target) if leaf.ndim == 3}
  assert len(tiled) == 5  # of the head, and four of a layer
  drafter = NGram(block - 1) if block > 1 else NoDrafter()

  def calls():
    """Operations of each fused computation that multiplies a packed weight."""
    jax.clear_caches()
    text, _ = advance_program(target, drafter, 1)
    parts = re.findall(r'(?m)^%[^\n]* -> [^\n]* {\n(.*?)^}', text, re.DOTALL)
    return [
      {name for _, name in found}
      for found in (list(instructions(part)) for part in parts)
      if 'reduce' in {name for _, name in found}
      and any(s in tiled and name == 'parameter' for s, name in found)
    ]

  found = calls()
  assert len(found) == 9  # four in each of two layers, and the head's
  assert not any({'bitcast', 'reshape', 'copy'} & names for names in found)
  if block > 1:
    monkeypatch.setattr(weights, '_dot_of_tiles', without_a_reversal)
    assert any('bitcast' in names for names in calls())


def logits_made(text):
  """Rows of logits in the largest array of them."""
  return max(
    (math.prod(s[:-1]) for s, _ in instructions(text) if s[-1:] == (V,)),
    default=0,
  )


@pytest.mark.slow
def test_prefill_makes_no_logits():
  target = toys.transformer(**SIZES)
  drafter = ModelDrafter(toys.transformer(**{**SIZES, 'layers': 1}), 4)
  given = arguments(target, drafter, 2)
  assert logits_made(prefill_text(decode.prefill, given)) == 0

  def wasteful(target, drafter, tokens, *rest):
    state = decode.prefill(target, drafter, tokens, *rest)
    output, _ = target.extend(decode.Block(tokens), state.cache)
    return state, target.unembed(output.features).max()

  assert logits_made(prefill_text(wasteful, given)) >= tokens_in(given)
  # A round makes no more than it verifies.
  text, _ = advance_program(target, NoDrafter(), 3)
  assert logits_made(text) == 3


def prefill_text(prefill, given):
  return jax.jit(prefill).lower(*given).compile(toys.QUICK).as_text()


def tokens_in(given):
  return math.prod(given[2].shape)
