"""The same on one device, on several, and in several processes."""

import random
import re
import signal
import socket
import time

import conformance_test
import jax
import mesh_program
import numpy as np
import pytest
import scripts
import toys
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from specjax import checkpoint, logs, processes, sharding
from specjax.models.transformer import Transformer, TransformerConfig

MESH = AbstractMesh((2, 2, 2), sharding.AXES)
PROGRAM = 'tests/mesh_program.py'


def test_a_parameter_is_divided_as_its_name_says():
  def spec(path, *shape):
    return sharding.spec(path, shape, MESH)

  assert spec('layers.0.qkv', 8, 12) == P('tensor', 'fsdp')
  assert spec('opt.1.mu.layers.0.qkv', 8, 12) == P('tensor', 'fsdp')
  assert spec('layers.0.down', 8, 12) == P('fsdp', 'tensor')
  # Drafts that train together.
  assert spec('layers.0.down', 5, 8, 12) == P(None, 'fsdp', 'tensor')
  assert spec('embedding', 13, 8) == P(None, 'fsdp')  # 13 is not divided
  assert spec('layers.0.hidden_norm', 8) == P()
  assert spec('heads.2.weights.0', 8, 8) == P(None, 'fsdp')
  assert spec('not_qkv', 8, 8) == P()


@pytest.mark.parametrize('name', conformance_test.EXAMPLES)
def test_every_matrix_has_a_rule(name):
  for module in (*conformance_test.EXAMPLES[name], conformance_test.TARGET):
    places = sharding.placed(module, MESH)
    pairs = zip(jax.tree.leaves(module), jax.tree.leaves(places), strict=True)
    for leaf, place in pairs:
      divides = any(n % 2 == 0 for n in np.shape(leaf))
      if np.ndim(leaf) > 1 and divides:
        assert place.spec != P(), f'a matrix {leaf.shape} of {name}'


def test_meshes_that_make_no_sense_are_refused():
  assert sharding.make() is None and sharding.make(data=0) is None
  for sizes in (dict(data=2), dict(data=0, fsdp=3)):
    with pytest.raises(ValueError, match='does not fit on 1 device:'):
      sharding.make(**sizes)
  for name, size in ('data', -1), ('fsdp', 0), ('tensor', 0):
    with pytest.raises(ValueError, match=f'mesh.{name} is {size}: at least'):
      sharding.make(**{'data': 0, name: size})
  with pytest.raises(ValueError, match=r'mesh.data is 2.5: at least 0, and wh'):
    sharding.make(data=2.5)
  sharding.require_rows(MESH, 8, 'batch')
  sharding.require_rows(None, 7, 'batch')
  with pytest.raises(ValueError, match=r'distill\.batch is 6, .* 4 parts'):
    sharding.require_rows(MESH, 6, 'distill.batch')
  with pytest.raises(ValueError, match=r'is from 0 to 1 where there are 2'):
    processes.join('host:1,2,2')
  for where in ('', 'host', 'host:1,2', 'host,2,1'):
    with pytest.raises(ValueError, match='give auto, or the address'):
      processes.join(where)


@pytest.mark.parametrize(
  'mesh',
  [
    AbstractMesh((2, 2), ('data', 'model')),
    AbstractMesh((2, 2, 2), sharding.AXES, axis_types=(AxisType.Explicit,) * 3),
    [1, 2],
  ],
)
def test_a_mesh_of_other_axes_is_refused(mesh):
  model = toys.transformer(vocab_size=16)
  with pytest.raises(ValueError, match='make it with specjax.sharding.make'):
    sharding.spread(model, mesh)
  with pytest.raises(ValueError, match='make it with specjax.sharding.make'):
    sharding.require_rows(mesh, 8, 'batch')


def test_an_axis_that_divides_nothing_is_refused():
  model = toys.transformer(vocab_size=16)
  for axis, sizes in ('tensor', (1, 1, 7)), ('fsdp', (1, 7, 2)):
    mesh = AbstractMesh(sizes, sharding.AXES)
    with pytest.raises(ValueError, match=f'{axis} is 7 and divides nothing of'):
      sharding.require_divided(model, mesh, 'target')
  sharding.require_divided(model, MESH, 'target')
  sharding.require_divided(model, None, 'target')


def test_bytes_are_those_of_the_fullest_device():
  model = jax.eval_shape(lambda: toys.transformer(vocab_size=16))
  whole = sharding.bytes_each(model)
  assert whole == sum(x.size * 4 for x in jax.tree.leaves(model))
  spread = sharding.described(model, MESH)
  # All matrices are in four parts, the norms in one.
  norms = sum(x.size * 4 for x in jax.tree.leaves(model) if x.ndim == 1)
  assert sharding.bytes_each(spread) == norms + (whole - norms) // 4


def finish(*running):
  """What each of them printed; fails where one of them does."""
  try:
    said = []
    for process in running:
      code, out, error = scripts.finish(process, timeout=300)
      assert code == 0, error[-3000:]
      said.append(out)
    return said
  finally:
    for process in running:
      process.kill()


def address():
  """Where processes of this machine may meet."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return f'localhost:{free.getsockname()[1]}'


def in_two(out, *sizes):
  """Starts the program in two processes of two devices each."""
  where = address()
  return [
    scripts.start(PROGRAM, out, *sizes, f'{where},2,{i}', devices=2)
    for i in range(2)
  ]


def as_mpirun(out, *sizes):
  """Likewise, where only the environment tells, as Open MPI's does."""
  job = 2**12 * random.randrange(2**12)  # a port near the end follows from it
  known = {
    'OMPI_MCA_orte_hnp_uri': f'{job}.0;tcp://127.0.0.1:1',
    'OMPI_COMM_WORLD_SIZE': '2',
  }
  return [
    scripts.start(
      PROGRAM,
      *(out, *sizes, 'auto'),
      devices=2,
      env=known
      | {
        'OMPI_COMM_WORLD_RANK': str(i),
        'OMPI_COMM_WORLD_LOCAL_RANK': str(i),
      },
    )
    for i in range(2)
  ]


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
  """By mesh, what the program came to there; and of its second process."""
  folder = tmp_path_factory.mktemp('meshes')
  finish(scripts.start(PROGRAM, folder / 'one', 1, 1, 1))
  finish(scripts.start(PROGRAM, folder / 'four', 2, 1, 2, devices=4))
  finish(scripts.start(PROGRAM, folder / 'stored', 1, 4, 1, devices=4))
  finish(*in_two(folder / 'two', 2, 1, 2))
  finish(*as_mpirun(folder / 'apart', 1, 4, 1))  # fsdp from process to process
  names = 'one', 'four', 'stored', 'two', 'apart'
  found = {name: np.load(folder / f'{name}0.npz') for name in names}
  return found | {'second': np.load(folder / 'two1.npz')}


MESHES = pytest.mark.parametrize(
  'name', ['four', 'stored', 'two', 'second', 'apart']
)


@pytest.mark.slow
@MESHES
def test_the_tokens_of_an_oracle_are_the_same(outcomes, name):
  for field in ('oracle', 'oracle/accepted'):
    np.testing.assert_array_equal(outcomes[name][field], outcomes['one'][field])
  assert outcomes['one']['oracle/accepted'].sum() > 20  # something was at stake


@pytest.mark.slow
@MESHES
def test_a_model_differs_by_rounding(outcomes, name):
  one, other = outcomes['one'], outcomes[name]
  apart = np.abs(one['logits'] - other['logits']).max()
  print(f'{name}: logits differ by {apart:.1e} at most')
  assert apart < 1e-5 * np.abs(one['logits']).max()
  # No near-tie is among these, so not a token differs.
  np.testing.assert_array_equal(one['model'], other['model'])


def first_mismatches(one, other, model):
  """By row where texts part: its place, the margin there, what is a tie."""
  for row, (ours, theirs) in enumerate(zip(one, other, strict=True)):
    differ = np.flatnonzero(ours != theirs)
    if differ.size:
      margin, tie = toys.top_two_margin(model, ours, differ[0])
      yield row, int(differ[0]), float(margin), float(tie)


@pytest.mark.slow
@MESHES
def test_where_tokens_part_two_were_as_good(outcomes, name):
  one, other = outcomes['one']['half'], outcomes[name]['half']
  model = toys.transformer(**mesh_program.HALF)
  for row, place, margin, tie in first_mismatches(one, other, model):
    print(f'{name}: row {row} parts at {place}, margin {margin:.4f} of {tie}')
    assert margin < tie
  # Anything else would be seen.
  wrong = one.copy()
  wrong[:, 12] = (wrong[:, 12] + 1) % model.vocab_size
  found = [m > tie for *_, m, tie in first_mismatches(one, wrong, model)]
  assert len(found) == len(one) and any(found)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['one', 'four', 'stored', 'two', 'apart'])
def test_a_plan_of_a_mesh_is_what_the_compiler_says(outcomes, name):
  for plan, compiled in outcomes[name]['planned']:
    assert 0.95 < compiled / plan < 1.05, (plan, compiled)


@pytest.mark.slow
@MESHES
def test_parameters_after_a_step_are_the_same(outcomes, name):
  one, other = outcomes['one'], outcomes[name]
  fields = [field for field in one.files if field.startswith('state/')]
  assert len(fields) > 10
  for field in fields:
    np.testing.assert_allclose(one[field], other[field], rtol=0, atol=1e-5)
  np.testing.assert_allclose(one['loss'], other['loss'], rtol=1e-5)


@pytest.mark.slow
def test_each_process_reads_its_own_rows_once(outcomes):
  mine = outcomes['two']['asked/0'], outcomes['second']['asked/1']
  np.testing.assert_array_equal(mine[0], range(4))
  np.testing.assert_array_equal(mine[1], range(4, 8))


TINY = (
  '--config=configs/stdlib.py:tiny',
  '--config.pretrain.steps=60',
  '--config.pretrain.batch=4',
  '--config.pretrain.eval_every=20',
)
FOUR = ('--config.mesh.data=2', '--config.mesh.tensor=2')
STORED = ('--config.mesh.fsdp=2', '--config.mesh.tensor=2')


def pretrain(folder, *more, devices=1):
  arguments = *TINY, f'--workdir={folder}', *more
  return scripts.start('train/pretrain.py', *arguments, devices=devices)


def parameters(folder):
  """Of the target's newest checkpoint, read onto one device."""
  target = folder / 'target'
  return checkpoint.load_model(
    target,
    lambda c: Transformer(TransformerConfig(**c), nnx.Rngs(0)),
    step=checkpoint.Checkpoints(target).latest(),
  )


def run_on(kind, folder):
  """Starts the training there: on devices of one process, or in two."""
  if kind in ('all of four', 'all of one'):  # by the same command
    devices = {'all of four': 4, 'all of one': 1}[kind]
    return [pretrain(folder, '--config.mesh.data=0', devices=devices)]
  if kind == 'two processes':
    where = address()
    return [
      pretrain(folder, *STORED, f'--distributed={where},2,{i}', devices=2)
      for i in (0, 1)
    ]
  if kind == 'four devices':
    return [pretrain(folder, *FOUR, devices=4)]
  return [pretrain(folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('begin', 'end'),
  [
    ('one device', 'four devices'),
    ('four devices', 'one device'),
    ('two processes', 'one device'),
    ('two processes', 'two processes'),
    ('all of four', 'all of one'),
  ],
)
def test_a_preempted_run_goes_on_elsewhere(tmp_path, begin, end):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  finish(*run_on('one device', whole))
  log = broken / 'logs' / 'pretrain.jsonl'
  begun = run_on(begin, broken)
  try:
    while not logs.read(log):
      assert begun[0].poll() is None, begun[0].communicate()[1][-3000:]
      time.sleep(0.01)
    begun[-1].send_signal(signal.SIGTERM)  # of several, to one
    errors = [process.communicate(timeout=120)[1] for process in begun]
  finally:
    for process in begun:
      process.kill()
  for process, error in zip(begun, errors, strict=True):
    assert process.returncode == 143, error[-3000:]
  reached = checkpoint.Checkpoints(broken / 'target').latest()
  assert 0 < reached < 60
  before = logs.read(log)
  assert before[-1]['step'] == reached
  said = f'pretrain is saved at step {reached}, and it ends as SIGTERM asks'
  assert [said in error for error in errors] == [True, False][: len(errors)]

  finish(*run_on(end, broken))
  a, b = parameters(whole), parameters(broken)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-3)
  lines = logs.read(log)
  assert lines[: len(before)] == before  # it went on, and did not begin again
  steps = [line['step'] for line in lines]
  assert steps == sorted(set(steps)) and steps[-1] == 60


@pytest.mark.parametrize(
  ('where', 'said'),
  [
    ('', 'give auto, or the address'),
    ('here:1234,2', 'give auto, or the address'),
    ('here:1234,2,2', 'from 0 to 1 where there are 2'),
    ('here:0,2,0', 'give auto, or the address'),
    ('http://here:1234,2,1', 'give auto, or the address'),
    ('here:99999,2,0', 'the port is not free'),
    ('{taken},2,0', 'the port is not free'),
    ('nowhere.invalid:1234,2,1', 'process 0 is not there'),
    ('{free},2,1', 'process 0 is not there'),
  ],
)
def test_an_address_that_cannot_be_is_refused_at_once(where, said, monkeypatch):
  monkeypatch.setattr(processes, 'PATIENCE', 0)
  with socket.socket() as other:
    other.bind(('', 0))
    other.listen()
    taken = f'localhost:{other.getsockname()[1]}'
    given = where.format(taken=taken, free=address())
    with pytest.raises(ValueError, match=said):
      processes.join(given)


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_other(tmp_path):
  """Which would wait for it for good; neither ends with a traceback."""
  where, more = address(), (*TINY, f'--workdir={tmp_path / "run"}', *FOUR)
  started = [
    scripts.start(
      'train/distill.py',
      *more,
      '--config.distill.batch=4',
      *own,
      f'--distributed={where},2,{i}',
      devices=2,
    )
    for i, own in enumerate(([], ['--draft=target']))
  ]
  first, second = (scripts.finish(process, 240) for process in started)
  assert (first[0], second[0]) == (2, 2)
  assert 'another process has ended: the same command goes on' in first[2]
  assert '--draft=target: a draft is kept' in second[2]
  assert 'Traceback' not in first[2] + second[2]


@pytest.mark.slow
def test_two_processes_train_a_target_and_a_draft(tmp_path):
  folder, where = tmp_path / 'run', address()
  more = (
    *TINY,
    f'--workdir={folder}',
    '--config.distill.batch=4',
    '--config.distill.steps=4',
    '--config.data.corpus=0.5',
    '--config.data.target=0.5',
    *FOUR,
  )
  second, out = finish(
    *(
      scripts.start(
        'train/distill.py', *more, f'--distributed={where},2,{i}', devices=2
      )
      for i in (1, 0)
    )
  )
  assert 'draft: acceptance' in out
  # What connects them is not Python's, and prints by itself: several threads
  # do, piece by piece, which may be mixed.
  pieces = (
    r'\[Gloo\] Rank ',
    'is connected to ',
    r'peer ranks\. ',
    'Expected number of connected peer ranks is : ',
    r'\d',
  )
  assert re.fullmatch(rf'({"|".join(pieces)}|\s)*', second), second
  lines = out.splitlines()
  held = next(i for i, x in enumerate(lines) if 'on each of 4 devices' in x)
  assert 'pretrain: ' in lines[held] and 'optimiser' in lines[held]
  # It is a run like any other, on one device too.
  write = 'eval/generate.py', f'--workdir={folder}', '--prompt=def'
  code, text, error = scripts.run(*write, '--tokens=8')
  assert code == 0 and text, error
  two = scripts.start(*write, '--tokens=8', '--tensor=2', devices=2)
  code, again, error = scripts.finish(two)
  assert (code, again) == (0, text) and 'into a round go' in error, error
  for given, devices, expected in (
    (['--tensor=2'], 1, '--tensor is 2, and devices here: 1'),
    (['--config.mesh.data=2'], 2, '--config.mesh.data=2: a mesh is of train/'),
    (['--tensor=2', '--draft_length=adaptive'], 2, 'costs? on one device'),
  ):
    refused = scripts.start(*write, *given, devices=devices)
    code, _, error = scripts.finish(refused)
    assert code == 2 and re.search(expected, error), error
  steps = [line['step'] for line in logs.read(folder / 'logs/pretrain.jsonl')]
  assert steps == sorted(set(steps)) and steps[-1] == 60
