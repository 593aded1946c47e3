"""Drafters: one file each, found by name.

A drafter's module has `build(config, vocab_size, rngs)`, which makes one from
the plain values of a configuration's `draft` section, with the draft length as
`k` and the sizes of the target as `target`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
  """The drafters that come with specjax."""
  return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ModuleType:
  """The module of a drafter.

  Args:
    name: one of `names()`, or the dotted name of a module of your own.

  Raises:
    ValueError: there is none.
  """
  full = name if '.' in name else f'{__name__}.{name}'
  try:
    return importlib.import_module(full)
  except ModuleNotFoundError as error:
    if not f'{full}.'.startswith(f'{error.name}.'):
      raise  # it exists, and lacks something of its own
    raise ValueError(
      f'there is no drafter {name!r}: take one of {", ".join(names())}, or the'
      ' dotted name of a module'
    ) from error
