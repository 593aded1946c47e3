"""Run folders: one place for all that a training run leaves behind.

`<run>/config.json` is the configuration its models were made with, as plain
JSON except that Python's `Infinity` and `NaN` are allowed.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import pathlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specjax import files

Path = pathlib.Path

ABSENT = '(absent)'

# What was done before pages had these, apart from `speedup.others`: a run from
# before predicts from as many prompts as others do.
_TRAINING = {'accumulate': 1, 'dtype': 'float32'}
_ADDED = {
  'corpus': {'test': ''},
  'target': {
    'path': '',
    'tokenizer_path': '',
    'document_start': '',
    'document_end': '',
    'remat': False,
  },
  'draft': {'path': '', 'model': {'remat': False}},
  'pretrain': _TRAINING,
  'distill': {**_TRAINING, 'patience': 0},
  'loss': {
    'divergence': 'forward_kl',
    'beta': 0.5,
    'eta': 3.0,
    'at_decode_warp': False,
    'horizon_decay': 0.8,
    'lookahead': 0,
  },
  'decode': {'verify': 'rejection', 'draft_length': 'fixed'},
  'speedup': {'controllers': (), 'controlled_k': 8, 'others': 32},
}
_ADDED_DRAFTERS = {
  'arms': (
    'ngram',
    'suffix',
    'model:draft',
    'iid:draft',
    'distinct:draft',
    'mixture:draft',
    'early_exit:1',
  ),
  'rules': ('rejection', 'block', 'traversal'),
  'contrastive_arms': ('model:draft', 'ngram'),
  'amateur': 'draft',
  'alpha': 0.1,
  'betas': (0.0, 0.1, 0.5),
  'batches': (1, 8),
  'temperatures': (0.0, 1.0),
  'prompts': 4,
  'repeats': 3,
}
_ADDED_DATA = {
  'corpus': 1.0,
  'target': 0.0,
  'draft': 0.0,
  'refresh': 60,
  'sequences': 128,
  'prompt_length': 32,
  'tokens': 96,
  'temperature': 1.0,
}


def complete(config: Any) -> Any:
  """Gives an older configuration what was added to pages since, in place.

  Args:
    config: nested, of the sections that were of interest.

  Returns:
    The configuration, in which everything does what it did.
  """
  _fill(config, _ADDED)
  if 'distill' in config and 'mesh' not in config:
    config['mesh'] = {'data': 1, 'fsdp': 1, 'tensor': 1}
  if 'distill' in config and 'data' not in config:
    config['data'] = dict(_ADDED_DATA)
  if 'speedup' in config and 'drafters' not in config:
    config['drafters'] = dict(_ADDED_DRAFTERS)
  return config


def write_json(path: str | Path, value: Any) -> None:
  """Writes a JSON file: all of it or, if interrupted, nothing."""
  with files.atomic(path) as file:
    file.write((json.dumps(value, indent=2) + '\n').encode())


def portable(value: Any) -> Any:
  """The value with what JSON has no number for as text: 'inf', 'nan'."""
  if isinstance(value, Mapping):
    return {key: portable(child) for key, child in value.items()}
  if isinstance(value, list | tuple):
    return [portable(child) for child in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def read_json(path: str | Path) -> Any:
  """Reads a JSON file.

  Args:
    path: the file.

  Returns:
    Its value.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is not JSON.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'there is no file {path}')
  try:
    return json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from error


def read_config(path: str | Path) -> dict[str, Any]:
  """The configuration of a run, as it was written.

  Args:
    path: of its `config.json`.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is not JSON, or holds no configuration.
  """
  value = read_json(path)
  if not isinstance(value, dict) or not value:
    raise ValueError(
      f'{path} holds no configuration: name a page with --config, and another'
      ' folder with --workdir'
    )
  return value


def newest(root: str | Path = 'runs') -> Path:
  """The run folder whose configuration was written last.

  Args:
    root: where run folders are.

  Returns:
    The folder.

  Raises:
    FileNotFoundError: there is no run.
  """
  configs = list(Path(root).glob('*/config.json'))
  if not configs:
    raise FileNotFoundError(
      f'no run under {root}/: make one with `make demo`, or with '
      '`python train/distill.py --config configs/stdlib.py`'
    )
  return max(configs, key=lambda path: path.stat().st_mtime_ns).parent


def open_run(
  directory: str | Path,
  config: Mapping[str, Any],
  frozen: Iterable[str],
  fresh: Iterable[str] = (),
) -> Path:
  """Makes a run folder, or reopens it if its configuration still holds.

  Args:
    directory: the folder.
    config: the configuration, JSON values by section.
    frozen: the sections that what is already in the folder depends on; they
      must be as they were.
    fresh: the sections that are replaced by the new values. Those in neither
      list stay as they were.

  Returns:
    The folder. Its `config.json` is now the newest.

  Raises:
    ValueError: a frozen section has changed.
  """
  directory = Path(directory)
  path = directory / 'config.json'
  # Through JSON, so that a tuple equals the list that it was written as.
  config = complete(json.loads(json.dumps(config)))
  if path.exists():
    old = complete(read_config(path))
    refuse_changes(directory, old, config, frozen)
    config = {**config, **old, **{name: config[name] for name in fresh}}
  write_json(path, config)
  return directory


def refuse_changes(
  directory: str | Path,
  old: Mapping[str, Any],
  new: Mapping[str, Any],
  sections: Iterable[str],
  flag: str = '--workdir',
) -> None:
  """Compares sections of two configurations.

  Args:
    directory: the run they belong to, for the message.
    old: what the run was made with, as JSON.
    new: what it shall go on with, as JSON.
    sections: the names of the sections to compare.
    flag: the option that would name another folder.

  Raises:
    ValueError: they differ; the message lists every value that does.
  """
  changes = differences(old, new, sections)
  if changes:
    raise ValueError(
      f'{directory} was made with another config ({"; ".join(changes)}): name '
      f'another folder with {flag}, or go back to the old values'
    )


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any], sections: Iterable[str]
) -> list[str]:
  """What differs between two configurations, as 'key: old -> new'.

  Args:
    old: JSON.
    new: likewise.
    sections: the names of the sections to compare.
  """
  # Through JSON, so that a tuple equals the list that it was written as.
  old, new = (complete(json.loads(json.dumps(config))) for config in (old, new))
  changes = []
  for section in sections:
    before = dict(leaves(section, old.get(section, {})))
    after = dict(leaves(section, new.get(section, {})))
    for key in sorted({*before, *after}):
      pair = before.get(key, ABSENT), after.get(key, ABSENT)
      if pair[0] != pair[1]:
        changes.append(f'{key}: {pair[0]} -> {pair[1]}')
  return changes


def device() -> dict[str, Any]:
  """What the programs run on."""
  import jax  # here, so that a mistyped command is refused at once

  first = jax.devices()[0]
  return {
    'platform': first.platform,
    'kind': first.device_kind,
    'count': jax.device_count(),
    'cpu': _cpu_name(),
    'cpu_count': os.cpu_count(),
  }


def versions() -> dict[str, str]:
  """The versions that a measurement depends on."""
  names = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')
  return {
    'python': platform.python_version(),
    **{name: importlib.metadata.version(name) for name in names},
  }


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
  """The values of a configuration's section, with their dotted names."""
  if not isinstance(value, Mapping):
    yield path, value
    return
  for key, child in value.items():
    yield from leaves(f'{path}.{key}', child)


def _fill(config: Any, added: Mapping[str, Any]) -> None:
  for name, value in added.items():
    if not isinstance(value, Mapping):
      if name not in config:
        config[name] = value
    elif name in config:
      _fill(config[name], value)


def _cpu_name() -> str:
  info = Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.exists() else []
  names = (line.split(':')[1].strip() for line in lines if 'model name' in line)
  return next(names, platform.machine())
