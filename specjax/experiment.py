"""The edge: command lines and configuration pages become plain arguments.

The only module that sees a `ConfigDict`. A page, `configs/x.py`, has a function
`get_config(variant='')`; `configs/x.py:tiny` calls it with 'tiny'. Every value
of it can be given on the command line, `--config.loss.kl_weight=1`. What is
misspelt or of another type is refused in one line before any work, with exit
code 2.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app as absl_app
from absl import flags, logging
from ml_collections import config_dict, config_flags

from specjax import runs

Path = pathlib.Path

_GO_ON = ': the same command goes on from the newest checkpoint'

_together = False  # whether this is one of several processes

# Types of error that specjax raises on purpose; see `deliberate`.
_ERRORS = (
  ValueError,
  TypeError,
  OSError,
  ImportError,
  RuntimeError,
  FloatingPointError,
  MemoryError,
)

# A flag is listed by --help if the script that was started defined it.
flags.disclaim_key_flags()


def app(
  main: Callable[[config_dict.ConfigDict, Path], Any],
  default: str | None = None,
  resumable: bool = False,
  distributed: bool = False,
  may_be_empty: Sequence[str] = (),
) -> NoReturn:
  """Runs a script.

  The configuration is the page named by `--config`; without one that of the run
  named by `--workdir`; without either `default`, or that of the newest run. The
  script may define further absl flags of its own.

  Args:
    main: is given the locked configuration and the run folder, `--workdir` or
      the configuration's `workdir`; returns the exit code, None for success.
    default: the page to use, such as 'configs/stdlib.py'; None for scripts that
      look at a run that exists.
    resumable: whether the same command goes on after an interruption.
    distributed: whether several devices may run it together, as `config.mesh`
      says, and several processes, with `--distributed`, of which only the first
      then prints.
    may_be_empty: the script's own flags whose text may be; another that is, as
      of a variable that is not set, is refused.
  """
  flags.DEFINE_string(
    'config',
    None,
    'configuration page, configs/x.py or configs/x.py:tiny; override its '
    f'values with --config.section.key=value (default: {default or "the run"})',
  )
  flags.DEFINE_string(
    'workdir', None, 'run folder (default: named by the page)'
  )
  if distributed:
    flags.DEFINE_string(
      'distributed',
      None,
      'that this is one of several processes, all started with this command:'
      ' auto (TPU pods, SLURM, Open MPI and Kubernetes tell which), or'
      " HOST:PORT,COUNT,NUMBER with process 0's address, how many there are and"
      ' which this is; they see one run folder',
    )
  # A drafter or a rule of one's own is looked for where one stands.
  sys.path.append(os.getcwd())
  rest, overrides = split(sys.argv)

  def parse(argv: Sequence[str]) -> list[str]:
    try:
      extra = flags.FLAGS(argv)[1:]
    except flags.Error as error:
      fail(error)
    except SystemExit:  # absl's --help ends with 1
      sys.exit(0)
    for name in flags.FLAGS:
      flag = flags.FLAGS[name]
      if flag.present and flag.value == '' and name not in may_be_empty:
        fail(f'--{name} is empty: give a value, or leave it out')
    if extra:
      hint = ' (a page is named with --config)' if '.py' in extra[0] else ''
      fail(f'unexpected argument {extra[0]!r}{hint}')
    return list(argv[:1])

  def run(_: Sequence[str]) -> int | None:
    # Orbax reports every file it opens, and at length what we say in a line.
    logging.set_verbosity(logging.FATAL)
    try:
      source = _source(flags.FLAGS.config, flags.FLAGS.workdir, default)
      spread = [x for x in overrides if x.startswith('--config.mesh.')]
      if spread and not distributed:
        raise ValueError(
          f'{spread[0]}: a mesh is of train/pretrain.py and train/distill.py'
        )
      config = override(load(source), overrides)
      if distributed and flags.FLAGS.distributed is not None:
        _join(flags.FLAGS.distributed)
      # A run may have been moved since its configuration was written.
      home = source.parent if isinstance(source, Path) else config.workdir
      return main(config, Path(flags.FLAGS.workdir or home))
    except KeyboardInterrupt:
      print(f'\ninterrupted{_GO_ON if resumable else ""}', file=sys.stderr)
      sys.exit(130)
    except _ERRORS as error:
      if _lost(error):
        fail(f'another process has ended{_GO_ON if resumable else ""}')
      if deliberate(error):
        fail(error)
      if not exhausted(error):
        raise
      reason = (str(error).strip() or 'of this process').splitlines()[0]
      fail(
        f'out of memory ({reason}): it takes smaller batches, shorter texts or'
        ' drafts, or more devices'
      )

  absl_app.run(run, argv=rest, flags_parser=parse)


def _join(where: str) -> None:
  """Makes this process one of several; but for the first they are silent."""
  from specjax import processes  # here, so that a mistyped command is quick

  processes.join(where)
  global _together
  _together = True
  if not processes.first():
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 - until the end


def _lost(error: BaseException) -> bool:
  """Whether another of several processes is gone."""
  return _together and sys.modules['specjax.processes'].lost(error)


def numbers(name: str, values: Sequence[str]) -> tuple[int, ...]:
  """The whole numbers of a list flag.

  Args:
    name: of the flag, for the message.
    values: as absl gives them.

  Raises:
    ValueError: one of them is no number from 1, or there is none.
  """
  if not values or not all(v.isdecimal() and int(v) for v in values):
    raise ValueError(
      f'{name} is {",".join(values)!r}: give whole numbers from 1, as 4,8'
    )
  return tuple(int(value) for value in values)


def fail(message: object) -> NoReturn:
  """Ends the process as for a mistake of the user: one line, exit code 2."""
  text = ' '.join(str(message).split())
  print(f'specjax: error: {text}', file=sys.stderr)
  if _together:
    sys.modules['specjax.processes'].leave(2)
  sys.exit(2)


def deliberate(error: BaseException) -> bool:
  """Whether an error was raised by specjax or the script, and meant for users.

  Other errors, even of the same type, are faults that want a traceback.
  """
  frame = traceback.extract_tb(error.__traceback__)[-1]
  ours = Path(__file__).parent, Path(sys.argv[0]).resolve().parent
  path = Path(frame.filename).resolve()
  return (frame.line or '').startswith('raise ') and any(
    path.is_relative_to(folder) for folder in ours
  )


def exhausted(error: BaseException) -> bool:
  """Whether an error says that memory is short, of the host or of a device."""
  of_device = type(error).__name__ == 'JaxRuntimeError'  # jax is not imported
  return isinstance(error, MemoryError) or (
    of_device and 'RESOURCE_EXHAUSTED' in str(error)
  )


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Parts a command line into ordinary arguments and `--config.key` ones."""
  rest, overrides = list(argv[:1]), []
  pending = list(argv[1:])
  while pending:
    argument = pending.pop(0)
    if not argument.startswith(('--config.', '-config.', '--noconfig.')):
      rest.append(argument)
      continue
    apart = '=' not in argument and pending and not pending[0].startswith('--')
    overrides.append(f'{argument}={pending.pop(0)}' if apart else argument)
  return rest, overrides


def load(source: str | Path) -> config_dict.ConfigDict:
  """Loads a configuration.

  Args:
    source: `page.py`, `page.py:variant`, or the `config.json` of a run.

  Returns:
    The configuration, locked.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it cannot be loaded, or a value has lost its type.
  """
  name, _, variant = str(source).partition(':')
  path = Path(name)
  if not path.is_file():
    pages = [page.as_posix() for page in Path('configs').glob('*.py')]
    raise FileNotFoundError(
      f'no configuration {name}{_nearest(path.as_posix(), pages)}'
    )
  if path.suffix == '.json':
    config = config_dict.ConfigDict(_tuples(runs.read_config(path)))
  else:
    config = _page(path, variant)
  with config.unlocked():
    runs.complete(config)
  for key, holder, field in _fields(config):
    if holder.get_type(field) is type(None):
      # ml_collections would now take anything for it, whatever it was before.
      raise ValueError(
        f'{source}: config.{key} is None and so has no type: give it a value, '
        'or config_dict.placeholder(int) to ask for one'
      )
  return config.lock()


def override(
  config: config_dict.ConfigDict, arguments: Sequence[str]
) -> config_dict.ConfigDict:
  """Sets values of a configuration.

  Args:
    config: a locked configuration, changed in place.
    arguments: such as `--config.loss.kl_weight=1`. An int will do for a float,
      and `inf` is one.

  Returns:
    The configuration.

  Raises:
    ValueError: there is no such key, a value is of another type, or a value
      that must be given is not.
  """
  fields = list(_fields(config))
  keys = [key for key, _, _ in fields]
  defaults = [holder[field] for _, holder, field in fields]
  for argument in arguments:
    key = argument.partition('config.')[2].partition('=')[0]
    inside = [name for name in keys if name.startswith(f'{key}.')]
    if inside:
      raise ValueError(
        f'config.{key} is a section: set a value of it, as config.{inside[0]}'
      )
    if key not in keys:
      raise ValueError(f'there is no config.{key}{_nearest(key, keys)}')
  values, argv = flags.FlagValues(), ['', *arguments]
  try:
    config_flags.DEFINE_config_dict(
      'config', config, flag_values=values, sys_argv=argv
    )
    values(argv)
  except flags.Error as error:
    raise ValueError(str(error)) from error
  for (key, holder, field), default in zip(fields, defaults, strict=True):
    if holder[field] is None:
      kind = holder.get_type(field).__name__
      raise ValueError(f'config.{key} must be given: --config.{key}={kind}')
    if isinstance(default, tuple) and holder[field] != default:
      holder[field] = _elements(key, holder[field], default)
  return config


def _source(
  page: str | None, workdir: str | None, default: str | None
) -> str | Path:
  """The configuration: a page's name, or the file of a run; see `app`."""
  if page:
    return Path(page) if page.endswith('.json') else page
  if workdir and ((Path(workdir) / 'config.json').exists() or not default):
    return Path(workdir) / 'config.json'
  if default:
    return default
  run = runs.newest()
  print(f'run: {run} (the newest; another with --workdir)', file=sys.stderr)
  return run / 'config.json'


def _page(path: Path, variant: str) -> config_dict.ConfigDict:
  """Runs a configuration page."""
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config(variant)
  except Exception as error:  # a page is the user's own program
    where = f'{path}:{variant}' if variant else f'{path}'
    kind = '' if type(error) is ValueError else f'{type(error).__name__}: '
    raise ValueError(f'{where}: {kind}{error}') from error


def _fields(
  config: config_dict.ConfigDict, prefix: str = ''
) -> Iterator[tuple[str, config_dict.ConfigDict, str]]:
  """Every value: its dotted key, the section that holds it, its name there."""
  for name, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      yield from _fields(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', config, name


def _elements(key: str, given: tuple, default: tuple) -> tuple:
  """Gives elements the type of the default's, which absl does not look at."""
  kind = type(default[0]) if default else _whole_or_text
  # A tuple with `inf` in it arrives as one string.
  texts = ','.join(map(str, given)).strip('()[] ').split(',')
  try:
    return tuple(kind(text.strip()) for text in texts if text.strip())
  except ValueError as error:
    raise ValueError(
      f'--config.{key}: {error}; it takes values of type {kind.__name__}'
    ) from error


def _whole_or_text(text: str) -> int | str:
  """What stands in a tuple that is empty on its page, as names or numbers."""
  return int(text) if text.lstrip('-').isdecimal() else text


def _tuples(value: Any) -> Any:
  """JSON has lists where a page has tuples."""
  if isinstance(value, dict):
    return {key: _tuples(child) for key, child in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _nearest(name: str, names: Iterable[str]) -> str:
  near = difflib.get_close_matches(name, list(names), n=1)
  return f'; did you mean {near[0]}?' if near else ''
