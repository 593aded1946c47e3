"""Runs the scripts as a user does."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags

ROOT = pathlib.Path(__file__).parents[1]


def start(script, *arguments, devices=1, env=()):
  """A script in a process of its own; several may run at once.

  On so many fake devices, with variables of the environment besides.
  """
  return subprocess.Popen(
    [sys.executable, ROOT / script, *map(str, arguments)],
    cwd=ROOT,
    env={
      **os.environ,
      **dict(env),
      'PYTHONPATH': os.pathsep.join([str(ROOT), *_path()]),
      # Compiles in half the time.
      'XLA_FLAGS': '--xla_backend_optimization_level=0'
      f' --xla_force_host_platform_device_count={devices}',
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _path():
  """Where else packages are found."""
  return filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))


def finish(process, timeout=600):
  """Its exit code, output and errors."""
  out, error = process.communicate(timeout=timeout)
  return process.returncode, out, error


def run(script, *arguments):
  """Starts and finishes it."""
  return finish(start(script, *arguments))


# The names of `gone` cannot be imported, nor what is in a package of them.
HIDE = """
import sys
gone = {gone}

class Gone:
  @staticmethod
  def find_spec(name, path, target=None):
    if name in gone or name.partition('.')[0] in gone:
      raise ModuleNotFoundError(f'no {{name}}', name=name)

sys.meta_path.insert(0, Gone)
"""


def execute(program, gone):
  """What a program prints, in a process where some modules are not there."""
  done = subprocess.run(
    [sys.executable, '-c', HIDE.format(gone=set(gone)) + program],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def load(script):
  """A script as a module; its flags are not kept, for others have the same."""
  path = ROOT / script
  spec = importlib.util.spec_from_file_location(f'{path.stem}_script', path)
  module = importlib.util.module_from_spec(spec)
  before = set(flags.FLAGS)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, spec.name, module)  # where flags look for theirs
    patch.syspath_prepend(path.parent)  # as for a script that is started
    spec.loader.exec_module(module)
  for name in set(flags.FLAGS) - before:
    # And not of a library that it was the first to import.
    if flags.FLAGS.find_module_defining_flag(name) == module.__name__:
      delattr(flags.FLAGS, name)
  return module
