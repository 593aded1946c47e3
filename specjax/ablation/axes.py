"""Axes: keys of a configuration, and the values that an ablation tries."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from specjax import runs

KL_WEIGHT = 'loss.kl_weight'
TRAINED = ('draft', 'distill', 'loss', 'data')
MEASURED = ('decode.k', 'decode.temperature', 'decode.verify')


def find(
  config: Mapping[str, Any], given: Iterable[str] = ()
) -> dict[str, tuple[Any, ...]]:
  """The axes of `config.ablation.axes`, of the types that their keys have.

  Args:
    config: plain nested dictionaries. Under `ablation.axes` a key stands where
      it stands in the configuration, with a tuple of values. A value of a
      section, such as `draft.model`, is a dictionary of what to change in it.
    given: further axes, as `draft.model.width=64,128`, or others of the same
      key.

  Returns:
    The values by dotted key; the KL weight comes first, if it is an axis.

  Raises:
    ValueError: there is no such key or value, or no point may differ in it.
  """
  if 'axes' not in config['ablation']:
    raise ValueError(
      "the run's configuration has no ablation.axes: name a page that has them,"
      ' as --config configs/stdlib.py'
    )
  found = {
    key: values
    for section, child in config['ablation']['axes'].items()
    for key, values in runs.leaves(section, child)
  }
  for text in given:
    key, _, values = text.partition('=')
    base = _look_up(config, key)
    found[key] = [_read(key, value, base) for value in values.split(',')]
  for key in found:
    inner = next((k for k in found if k.startswith(f'{key}.')), None)
    if inner:
      raise ValueError(f'ablation.axes: {inner} is part of {key}: name one')
  for key, values in found.items():
    base = _look_up(config, key)
    if not isinstance(values, list | tuple):
      raise ValueError(f'ablation.axes.{key} is {values!r}: give a tuple')
    values = tuple(_typed(key, value, base) for value in values)
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice or not values:
      what = f'has {twice[0]} twice' if twice else 'has no value'
      raise ValueError(f'ablation.axes.{key} {what}: give each value once')
    found[key] = values
  if len(found.get('decode.verify', ())) > 1:
    if not config['ablation']['timed_prompts']:
      raise ValueError(
        'ablation.axes.decode.verify has several rules, which differ in speed'
        ' alone: give ablation.timed_prompts'
      )
  return dict(sorted(found.items(), key=lambda axis: axis[0] != KL_WEIGHT))


def label(value: Any) -> str:
  """A value of an axis, for people."""
  if isinstance(value, Mapping):
    inside = itertools.chain.from_iterable(
      runs.leaves(name, child) for name, child in value.items()
    )
    return ' '.join(f'{name}={label(child)}' for name, child in inside)
  if isinstance(value, float):
    return '∞' if value == float('inf') else f'{value:g}'
  return str(value)


def _look_up(config: Mapping[str, Any], key: str) -> Any:
  """The value of a key that a point may differ in."""
  section = key.partition('.')[0]
  value = config
  for part in key.split('.'):
    value = value.get(part) if isinstance(value, Mapping) else None
  if value is None:
    names = [
      name
      for part in (*TRAINED, 'decode')
      for name, _ in runs.leaves(part, config.get(part, {}))
    ]
    near = difflib.get_close_matches(key, names, n=1)
    hint = f'; did you mean {near[0]}?' if near else ''
    raise ValueError(f'ablation.axes.{key}: there is no config.{key}{hint}')
  if section not in TRAINED and key not in MEASURED:
    raise ValueError(
      f'ablation.axes.{key}: points differ in a key of {", ".join(TRAINED)}, or'
      f' in {", ".join(MEASURED)}; for another target make another run'
    )
  return value


def _read(key: str, text: str, base: Any) -> Any:
  """A value from the command line."""
  if isinstance(base, bool | Mapping | list | tuple):
    raise ValueError(
      f'--axis {key} is a section or a list: name it in ablation.axes of a page'
    )
  try:
    return type(base)(text)
  except ValueError as error:
    raise ValueError(f'--axis {key}={text}: {error}') from error


def _typed(key: str, value: Any, base: Any) -> Any:
  """A value in the type of the configuration's own, a section's in parts."""
  if isinstance(base, Mapping) and isinstance(value, Mapping):
    for name in value:
      if name not in base:
        raise ValueError(f'ablation.axes.{key}: there is no {key}.{name}')
    return {
      name: _typed(f'{key}.{name}', child, base[name])
      for name, child in value.items()
    }
  if type(base) is float and type(value) is int:
    return float(value)
  if type(base) is not type(value):
    raise ValueError(
      f'ablation.axes.{key} has {value!r}: it takes values of type'
      f' {type(base).__name__}'
    )
  return value


def put(config: dict[str, Any], key: str, value: Any) -> None:
  """Sets a value of a configuration, or those of a section, in place.

  Sections on the way that are not there are made.
  """
  if isinstance(value, Mapping):
    for name, child in value.items():
      put(config, f'{key}.{name}', child)
    return
  *path, last = key.split('.')
  for name in path:
    config = config.setdefault(name, {})
  config[last] = value
