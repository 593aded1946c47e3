"""What every drafter owes, whoever wrote it: the files are found by name.

A new file of `specjax/drafters` needs an example here, and nothing else, to be
received. The target is a small transformer, so that all of them have what they
borrow from; its law is enumerated.
"""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys

import compiled_test
import jax
import jax.numpy as jnp
import law_test
import numpy as np
import oracles
import pytest
import scripts
import toys
from flax import nnx

from specjax import (
  decode,
  distill,
  drafters,
  generation,
  losses,
  sharding,
  timing,
  verify,
  warps,
)
from specjax.candidates import CandidateTree
from specjax.certify import samples
from specjax.types import Batch, Keys

K, V, LAYERS = 3, 3, 2
PROMPTS, STEPS = law_test.PROMPTS, law_test.STEPS
ROWS = 4000  # of each prompt


def lively(drafter):
  """With weights that all matter, where it has any."""
  rng = np.random.default_rng(0)

  def move(x):
    if not np.ndim(x):  # a number of the warp
      return x
    return x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)

  return jax.tree.map(move, drafter)


def examples(target, model):
  """By file: the ways to draft that it has.

  Args:
    target: whom they draft for.
    model: a draft model.
  """
  sizes = dataclasses.asdict(model.config)
  del sizes['vocab_size']
  heads = {'heads': K}
  pages = {
    'blockwise': {'blockwise': heads},
    'coupled': {'model': sizes},
    'eagle': {'eagle': {'hidden': 8, 'unroll': K}},
    'early_exit': {'layers': 1},
    'medusa': {'medusa': heads},
    'model': {'model': sizes},
    'tree': {'model': sizes, 'branching': (2,)},
  }
  found = {}
  known = drafters.names()
  for name, page in pages.items():
    if name not in known:  # its file is gone, and the others are tested
      continue
    build = drafters.find(name).build
    drafter = build({**page, 'k': K}, target.config, nnx.Rngs(0))
    found[name] = [lively(drafter)]
  of = {name: drafters.find(name) for name in known}
  found['none'] = [of['none'].NoDrafter()]
  if 'ngram' in of:
    lookup = of['ngram'].NGram
    found['ngram'] = [lookup(K), lookup(K, n=8, least=2)]
  if 'committee' in of:
    found['committee'] = [of['committee'].Committee((found['model'][0],) * 2)]
  if 'mixture' in of:
    parts = lookup(K), found['model'][0]
    found['mixture'] = [of['mixture'].Mixture(*parts)]
  for own in found.get('tree', [])[:1]:
    found['tree'].append(dataclasses.replace(own, replacement=True))
  for own in found.get('eagle', [])[:1]:
    found['eagle'].append(own.tree(nodes=4, beam=2))
  paths = ((0,), (1,), (0, 0), (0, 2), (0, 2, 1))
  for name in {'medusa', 'blockwise'} & {*of}:
    own = found[name][0]
    found[name].append(CandidateTree(own.heads, own.k, paths=paths))
  return found


def small(**changes):
  return toys.transformer(
    **dict(vocab_size=V, width=8, heads=2, kv_heads=1, hidden=8, **changes)
  )


TARGET = small(layers=LAYERS)
EXAMPLES = examples(TARGET, small(seed=1, layers=1))
CASES = [(name, i) for name, own in EXAMPLES.items() for i in range(len(own))]
EVERYDAY = (('ngram', 0),)
every = pytest.mark.parametrize(
  ('name', 'i'),
  [
    case if case in EVERYDAY else pytest.param(*case, marks=pytest.mark.slow)
    for case in CASES
  ],
)
trainable = pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[] if name == 'medusa' else pytest.mark.slow)
    for name, own in EXAMPLES.items()
    if hasattr(own[0], 'score') and name not in ('coupled', 'tree')
  ],
)


def rule_for(drafter):
  coupled = getattr(drafter, 'siblings', None) == 'coupled'
  return verify.sampler_match if coupled else verify.rejection


def with_warp(drafter, warp):
  if hasattr(drafter, 'warp'):
    return dataclasses.replace(drafter, warp=warp)
  return drafter


def test_every_file_has_an_example():
  assert set(EXAMPLES) == set(drafters.names())


@toys.jit
def run(drafter, rule, temperature):
  """Tokens `[ROWS, prompts, STEPS]`, at any temperature."""
  size = max(map(len, PROMPTS)) + STEPS
  tokens = np.array([p + [0] * (size - len(p)) for p in PROMPTS], np.int32)
  length = jnp.array([len(p) for p in PROMPTS])
  warp = warps.Temperature(temperature)
  drafter = with_warp(drafter, warp)
  rows = jax.random.split(jax.random.key(0), (ROWS, len(PROMPTS)))
  start = decode.prefill(
    TARGET, drafter, tokens, length, length + STEPS, length, rows[0]
  )
  never = jnp.zeros(0, jnp.int32)

  def one(row):
    state = start._replace(row=row)
    state = decode.advance(TARGET, drafter, rule, warp, never, state, 99)
    index = length[:, None] + jnp.arange(STEPS)
    return jnp.take_along_axis(state.tokens, index, 1)

  return jax.vmap(one)(rows)


@functools.cache
def laws():
  """`[V] * STEPS` behind each prompt, by passes over whole texts."""
  paths = np.array([*itertools.product(range(V), repeat=STEPS)])
  found = []
  for prompt in PROMPTS:
    text = np.concatenate([np.tile(prompt, (len(paths), 1)), paths], 1)
    features = forward(jnp.asarray(text)).features
    law = oracles.softmax(TARGET.unembed(features))[:, len(prompt) - 1 : -1]
    picked = np.take_along_axis(law, paths[..., None], -1)[..., 0]
    found.append(picked.prod(-1).reshape((V,) * STEPS))
  return found


@toys.jit
def forward(tokens):
  return TARGET.forward(tokens, jnp.ones_like(tokens))


def p_value(drafter, rule):
  tokens = np.asarray(run(drafter, rule, 1.0))
  return min(oracles.p_value(tokens[:, i], law) for i, law in enumerate(laws()))


@every
def test_the_law_is_the_target_s_and_greedy_text_too(name, i):
  """In one program, which serves every temperature."""
  drafter = EXAMPLES[name][i]
  rule = verify.as_pytree(rule_for(drafter))
  before = run._cache_size()
  assert p_value(drafter, rule) >= 1e-4
  greedy = np.asarray(run(drafter, rule, 0.0))
  assert run._cache_size() <= before + 1
  for column, law in enumerate(laws()):
    for at in range(STEPS):
      # The law of the next token behind what was written.
      law = law.reshape(V, -1)
      assert (greedy[:, column, at] == law.sum(1).argmax()).all()
      law = law[law.sum(1).argmax()]


def test_a_law_that_is_not_the_target_s_is_found():
  """Acceptance without the residual."""
  drafter = EXAMPLES['model'][0]
  rule = verify.as_pytree(verify.typical)
  assert p_value(drafter, rule) < 1e-4


step = toys.jit(decode.step, static_argnums=2)
prefill = toys.jit(decode.prefill)


@toys.jit
def propose(drafter, state):
  keys = Keys(state.row, state.row)
  return drafter.propose(
    TARGET, state.cache, state.memory, keys, state.tokens, state.length
  )[0]


def begin(drafter, tokens, length):
  stop = jnp.full_like(length, tokens.shape[1])
  row = jax.random.split(jax.random.key(1), len(length))
  return prefill(TARGET, drafter, tokens, length, stop, length, row)


def differ(name, i, forget=lambda memory: memory):
  """Whether a memory with a past proposes other than a cold one."""
  drafter = EXAMPLES[name][i]
  tokens = np.random.default_rng(0).integers(0, V, (2, 64), np.int32)
  state = begin(drafter, jnp.asarray(tokens), jnp.array([1, 21]))
  never = jnp.zeros(0, jnp.int32)
  for turn in range(6):
    # A row that rests, and goes on.
    state = state._replace(done=jnp.array([turn == 2, turn == 4]))
    state, _ = step(
      TARGET, drafter, rule_for(drafter), warps.UNCHANGED, never, state
    )
    state = state._replace(memory=forget(state.memory))
    drafts = [
      propose(drafter, s)
      for s in (state, begin(drafter, state.tokens, state.length))
    ]
    leaves = zip(*map(jax.tree.leaves, drafts), strict=True)
    if not all(np.allclose(a, b, atol=1e-4) for a, b in leaves):
      return True
  return False


@every
def test_memory_is_a_function_of_the_text(name, i):
  assert not differ(name, i)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['model', 'eagle', 'medusa'])
def test_a_memory_that_is_not_would_be_seen(name):
  def forget(memory):
    return jax.tree.map(
      lambda x: x * 0.5 if jnp.issubdtype(x.dtype, jnp.floating) else x, memory
    )

  assert differ(name, 0, forget)


@trainable
def test_gradients_are_finite_under_every_loss(name):
  drafter = EXAMPLES[name][0]
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 10)))
  segments = jnp.array([[1] * 6 + [2] * 4, [1] * 7 + [0] * 3])
  batch = Batch(tokens, segments, (segments > 0).astype(jnp.float32))

  def values(drafter):
    found = []
    for name in losses.DIVERGENCES:
      total, count = distill.distill_loss(
        drafter,
        TARGET,
        batch,
        distill.objective(3.0),
        divergence=losses.find(name),
      )
      found.append(total / count)
    return jnp.stack(found)

  for leaf in jax.tree.leaves(toys.jit(jax.jacrev(values))(drafter)):
    assert np.isfinite(leaf).all()
    # Every loss teaches every weight something, but the numbers of the warp.
    if leaf.ndim > 1:
      assert np.abs(leaf).reshape(len(leaf), -1).sum(1).all()


@every
def test_it_is_timed_and_certified(name, i):
  """As the commands do that measure: neither is a round of the loop."""
  drafter = EXAMPLES[name][i]
  tokens = jnp.zeros((2, 64), jnp.int32)
  state = begin(drafter, tokens, jnp.array([1, 21]))
  if name != 'none':
    jax.eval_shape(timing.proposals, TARGET, drafter, state, 3)
  directions = [samples.Replayed(drafter)]
  if hasattr(drafter, 'score'):
    directions.append(drafter)
  for direction in directions:
    seen = jax.eval_shape(
      functools.partial(samples._observe, new=4),
      TARGET,
      direction,
      warps.UNCHANGED,
      tokens,
      jnp.array([1, 2]),
    )
    assert seen.p_hit.shape == (2, 4)


@every
def test_the_loop_copies_no_cache(name, i):
  wide = {**compiled_test.SIZES, 'layers': 1}
  target = toys.transformer(**{**wide, 'layers': LAYERS})
  drafter = examples(target, toys.transformer(**wide))[name][i]
  text, state = compiled_test.advance_program(
    target, drafter, 2, rule=rule_for(drafter)
  )
  assert ' while(' in text and 'dynamic-update-slice' in text
  # Not even on entry, for the state is donated.
  assert not compiled_test.copies(text, state)
  # Nor is a vocabulary sorted.
  sorts = [x for x, kind in compiled_test.instructions(text) if kind == 'sort']
  assert not any(compiled_test.V in shape for shape in sorts)


@pytest.mark.slow
def test_rows_on_four_devices_are_the_rows_on_one():
  program = """
import jax, numpy as np, toys
import conformance_test as suite
from specjax.drafters.none import NoDrafter
plain = suite.written(NoDrafter())
assert jax.device_count() == 4
mesh = suite.sharding.make(data=4)
for where in (mesh, None), (None, mesh):
  target, draft = suite.TARGET, suite.EXAMPLES['model'][0]
  one = jax.devices()[0]
  pair = [
    suite.sharding.spread(model, at) if at else jax.device_put(model, one)
    for model, at in zip((target, draft), where)
  ]
  try:
    suite.generation.start(
      *pair, [[1]] * 4, key=jax.random.key(0), max_new_tokens=1, mesh=mesh
    )
  except ValueError as error:
    assert 'does not lie on the mesh' in str(error), error
  else:
    raise AssertionError('models that lie elsewhere are taken')
for name, own in suite.EXAMPLES.items():
  spread = suite.written(own[-1], data=4)
  np.testing.assert_array_equal(spread, plain, name)
# Layers too, and a vocabulary that can be divided.
target = toys.transformer(vocab_size=8, qkv_bias=True)
draft = toys.transformer(1, vocab_size=8, layers=1, qkv_bias=True)
plain = suite.written(NoDrafter(), target)
for name, own in suite.examples(target, draft).items():
  spread = suite.written(own[-1], target, data=2, tensor=2)
  np.testing.assert_array_equal(spread, plain, name)
print('all')
"""
  done = subprocess.run(
    [sys.executable, '-c', program],
    env={
      **os.environ,
      'PYTHONPATH': f'{scripts.ROOT}:{scripts.ROOT / "tests"}',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
    },
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.stdout == 'all\n', done.stderr[-2000:]


def written(drafter, target=None, **sizes):
  """Greedy text of four rows, on one device or on a mesh.

  Each device has a loop of its own, since rows have nothing to say to one
  another. Were they one program's, it would exchange what a CPU writes row by
  row, and devices in two exchanges at once wait for one another for good.
  """
  rng, warp = np.random.default_rng(0), warps.Temperature(0.0)
  mesh = sharding.make(**sizes)
  models = target or TARGET, with_warp(drafter, warp)
  target, own = sharding.spread(models, mesh)
  state = generation.start(
    target,
    own,
    [rng.integers(0, V, n).tolist() for n in (1, 4, 9, 2)],
    key=jax.random.key(0),
    max_new_tokens=15,
    mesh=mesh,
  )
  rule, never = verify.as_pytree(rule_for(drafter)), jnp.zeros(0, jnp.int32)
  settings = target, own, rule, warp, never
  state = generation.advance(*settings, state, 99, mesh=mesh)
  assert len(state.tokens.sharding.device_set) == (4 if sizes else 1)
  return np.asarray(state.tokens)
