"""Command lines: what is meant is done, what is not is one line and code 2."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from specjax import experiment, runs

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / 'configs').glob('*.py'))

PAGE = """
from ml_collections import config_dict
def get_config(variant=''):
  config = config_dict.ConfigDict(dict(
    workdir='runs/x', tied=True, kl_weights=(0.0, 0.1),
    loss=dict(kl_weight=1.0), decode=dict(k=4, name='a')))
  if variant == 'tiny':
    config.decode.k = 1
  elif variant:
    raise ValueError("there is no such variant; there is 'tiny'")
  return config
"""


@pytest.fixture
def page(tmp_path):
  path = tmp_path / 'page.py'
  path.write_text(PAGE)
  return path


@pytest.fixture
def config(page):
  return experiment.load(page)


def test_a_page_and_its_variant(page):
  assert experiment.load(page).decode.k == 4
  assert experiment.load(f'{page}:tiny').decode.k == 1


@pytest.mark.parametrize(
  'argument, key, value',
  [
    ('--config.decode.k=8', 'k', 8),
    ('--config.decode.name=4', 'name', '4'),
    ('--config.decode.name=a=b', 'name', 'a=b'),
  ],
)
def test_a_value_is_overridden(config, argument, key, value):
  assert experiment.override(config, [argument]).decode[key] == value


@pytest.mark.parametrize('text, value', [('1', 1.0), ('inf', math.inf)])
def test_an_int_and_inf_will_do_for_a_float(config, text, value):
  experiment.override(config, [f'--config.loss.kl_weight={text}'])
  assert type(config.loss.kl_weight) is float
  assert config.loss.kl_weight == value


@pytest.mark.parametrize('text', ['0,1,inf', '(0, 1, inf)', '(0,1,inf,)'])
def test_elements_of_a_tuple_keep_their_type(config, text):
  experiment.override(config, [f'--config.kl_weights={text}'])
  assert repr(config.kl_weights) == '(0.0, 1.0, inf)'


@pytest.mark.parametrize(
  'argument, message',
  [
    ('--config.decode.k=4.5', "--config.decode.k=4.5: .*int.*'4.5'"),
    ('--config.decode.k=four', "--config.decode.k=four: .*int.*'four'"),
    ('--config.decode.k=True', '--config.decode.k=True: .*int'),
    ('--config.decode.k=None', '--config.decode.k=None: .*int'),
    ('--config.decode.k=', '--config.decode.k=: .*int'),
    ('--config.decode.k', 'Missing value for flag --config.decode.k'),
    ('--config.tied=perhaps', '--config.tied=perhaps: .*boolean'),
    ('--config.loss.kl_weight=True', '--config.loss.kl_weight=True: .*float'),
    ('--config.kl_weights=0,one', "--config.kl_weights: .*'one'.*float"),
    ('--config.loss.kl_wieght=1', 'loss.kl_wieght; did you mean loss.kl_weig'),
    ('--config.los.kl_weight=1', 'no config.los.kl_weight; .* loss.kl_weight?'),
    ('--config.kl_weight=1', 'no config.kl_weight; did you mean'),
    ('--config.zzz=1', 'there is no config.zzz$'),
    ('--config.loss=1', 'config.loss is a section: .*, as config.loss.'),
    ("--config.loss={'kl_wieght': 1}", 'config.loss is a section'),
  ],
)
def test_a_wrong_override_is_refused(config, argument, message):
  with pytest.raises(ValueError, match=message):
    experiment.override(config, [argument])


def test_the_script_cannot_misspell_a_key_either(config):
  with pytest.raises(AttributeError):
    config.decode.temprature = 1.0
  with pytest.raises(TypeError):
    config.decode.k = 'four'


def test_no_value_loses_its_type(tmp_path):
  page = tmp_path / 'page.py'
  page.write_text(PAGE.replace('loss=', 'k=None, loss='))
  with pytest.raises(ValueError, match='config.k is None and so has no type'):
    experiment.load(page)

  page.write_text(
    PAGE.replace('loss=', 'k=config_dict.placeholder(int), loss=')
  )
  with pytest.raises(ValueError, match='must be given: --config.k=int'):
    experiment.override(experiment.load(page), [])
  with pytest.raises(ValueError, match="invalid.*'four'"):
    experiment.override(experiment.load(page), ['--config.k=four'])
  assert experiment.override(experiment.load(page), ['--config.k=4']).k == 4


def test_overrides_are_told_from_other_arguments():
  line = 'x.py --config c.py --config.a.b 3 --n=1 --config.c=-2 --config.d'
  rest, overrides = experiment.split([*line.split(), '--noconfig.e', '--z'])
  assert rest == ['x.py', '--config', 'c.py', '--n=1', '--z']
  assert overrides == [
    '--config.a.b=3',
    '--config.c=-2',
    '--config.d',
    '--noconfig.e',
  ]


def test_a_bare_boolean(config):
  assert not experiment.override(config, ['--noconfig.tied']).tied
  assert experiment.override(config, ['--config.tied']).tied


def test_a_run_keeps_its_configuration(tmp_path, config):
  experiment.override(config, ['--config.loss.kl_weight=inf'])
  run = runs.open_run(tmp_path / 'run', config.to_dict(), frozen=())
  again = experiment.load(run / 'config.json')
  assert again.to_dict() == config.to_dict()
  with pytest.raises(ValueError, match='int'):
    experiment.override(again, ['--config.decode.k=4.5'])


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_every_page_loads_shrinks_and_comes_back(path, tmp_path):
  full, tiny = experiment.load(path), experiment.load(f'{path}:tiny')
  assert full.workdir != tiny.workdir
  for config in (full, tiny):
    for section in (config.target, config.corpus):
      for name, value in section.items():
        if value is None:  # left to be given
          section[name] = 'given'
    runs.write_json(tmp_path / 'config.json', config.to_dict())
    again = experiment.load(tmp_path / 'config.json')
    assert again.to_dict() == config.to_dict()
  with pytest.raises(ValueError, match="tinny: .*'tiny'"):
    experiment.load(f'{path}:tinny')


SCRIPT = """
import sys
from absl import flags
sys.path.insert(0, {root!r})
from specjax import experiment
_ACT = flags.DEFINE_string('act', '', 'what to do')
def main(config, workdir):
  print('k', config.decode.k, 'in', workdir)
  if _ACT.value == 'interrupt':
    raise KeyboardInterrupt
  if _ACT.value == 'refuse':
    raise ValueError('widths differ:\\n 3 and 4')
  if _ACT.value == 'fault':
    int('x')
  if _ACT.value in ('host', 'device'):
    import jax.numpy as jnp
    import numpy as np
    (np if _ACT.value == 'host' else jnp).zeros((2**20, 2**21))
  if _ACT.value == 'list':
    [0] * 2**60
  if _ACT.value == 'disk':  # TensorStore's word for a full one
    raise OSError('not written: RESOURCE_EXHAUSTED: No space left on device')
if __name__ == '__main__':
  experiment.app(main, default={default!r}, resumable=True)
"""


# Forks, for each line, a process that goes on to run the script named there.
SERVER = """if True:
  import json, os, runpy, sys
  from specjax import experiment  # once for all, since it takes a second
  for line in sys.stdin:
    script, *arguments = json.loads(line)
    child = os.fork()
    if not child:
      break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
  else:
    sys.exit()
  os.chdir(os.path.dirname(script))
  for name, number in (('stdout', 1), ('stderr', 2)):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
  sys.argv = [script, *arguments]
  runpy.run_path(script, run_name='__main__')
"""


@pytest.fixture(scope='module')
def server():
  """Runs scripts in processes of their own; gives the exit code of each."""
  command = [sys.executable, '-c', SERVER]
  with subprocess.Popen(
    command,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:

    def run(*command):
      print(json.dumps(command), file=process.stdin, flush=True)
      return int(process.stdout.readline())

    yield run
    process.stdin.close()


@pytest.fixture
def script(tmp_path, page, server):
  """Runs a script in a folder of its own; gives code, stdout and stderr."""

  def call(*arguments, default=str(page)):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT.format(root=str(ROOT), default=default))
    code = server(str(path), *arguments)
    said = ((tmp_path / name).read_text() for name in ('stdout', 'stderr'))
    return code, *said

  return call


def test_a_script_runs(script, page):
  assert script() == (0, 'k 4 in runs/x\n', '')
  line = ['--config', f'{page}:tiny', '--workdir=w', '--config.decode.k', '9']
  assert script(*line) == (0, 'k 9 in w\n', '')
  code, out, _ = script('--help')
  assert code == 0
  assert all(flag in out for flag in ('--config', '--workdir', '--act'))


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--config.decode.kk=1'], ['config.decode.kk', 'mean decode.k?']),
    (['--config.decode.k=4.5'], ['--config.decode.k=4.5', 'int']),
    (['--confg=x.py'], ['confg', 'config']),
    (['--config=page.py:tinny'], ['page.py:tinny', "'tiny'"]),
    (['--config=nowhere.py'], ['no configuration nowhere.py']),
    (['page.py'], ["unexpected argument 'page.py'", '--config']),
    (['--act='], ['--act is empty']),
    (['--config='], ['--config is empty']),
    (['--act=disk'], ['error: not written: RESOURCE_EXHAUSTED']),
    (['--act=refuse'], ['widths differ: 3 and 4']),
  ],
)
def test_a_mistake_is_one_line_and_code_2(script, arguments, words):
  code, _, error = script(*arguments)
  assert code == 2
  assert error.count('\n') == 1
  assert error.startswith('specjax: error: ')
  assert all(word in error for word in words)


def test_a_page_that_fails_is_named(script, tmp_path):
  (tmp_path / 'bad.py').write_text('def get_config(variant):\n  return nme\n')
  code, _, error = script('--config=bad.py')
  assert code == 2
  assert "bad.py: NameError: name 'nme' is not defined" in error


def test_the_nearest_page_is_named(script, tmp_path):
  (tmp_path / 'configs').mkdir()
  (tmp_path / 'configs' / 'stdlib.py').write_text(PAGE)
  _, _, error = script('--config=configs/stdlb.py')
  assert 'did you mean configs/stdlib.py?' in error


def test_a_fault_keeps_its_traceback(script):
  code, _, error = script('--act=fault')
  assert code == 1
  assert 'Traceback' in error


@pytest.mark.parametrize('memory', ['host', 'device', 'list'])
def test_too_little_memory_is_said_in_a_line(script, memory):
  code, _, error = script(f'--act={memory}')
  assert code == 2
  assert error.count('\n') == 1
  assert error.startswith('specjax: error: out of memory (')
  assert 'smaller batches' in error


def test_an_interruption_says_how_to_go_on(script):
  code, _, error = script('--act=interrupt')
  assert code == 130
  assert (
    error
    == '\ninterrupted: the same command goes on from the newest checkpoint\n'
  )


def test_the_configuration_of_a_run_is_found(script, tmp_path):
  code, _, error = script(default=None)
  assert code == 2
  assert 'no run under runs/: make one with' in error

  for time, name in enumerate(('older', 'newer', 'old')):
    values = {'workdir': f'runs/{name}', 'decode': {'k': time}}
    config = runs.open_run(tmp_path / 'runs' / name, values, ()) / 'config.json'
    os.utime(config, (time % 2, time % 2))
  code, out, error = script(default=None)
  assert (code, out) == (0, 'k 1 in runs/newer\n')
  assert error == 'run: runs/newer (the newest; another with --workdir)\n'
  # A run's own configuration comes before the default page.
  assert script('--workdir=runs/old') == (0, 'k 2 in runs/old\n', '')
  _, _, error = script('--workdir=runs/none', default=None)
  assert 'no configuration runs/none/config.json' in error


@pytest.mark.parametrize('value', [[], {}, 3])
def test_a_run_whose_configuration_is_none_is_refused(tmp_path, value):
  runs.write_json(tmp_path / 'config.json', value)
  with pytest.raises(ValueError, match=r'config\.json holds no configuration'):
    experiment.load(tmp_path / 'config.json')
  with pytest.raises(ValueError, match=r'config\.json holds no configuration'):
    runs.open_run(tmp_path, {'workdir': 'x'}, ())
