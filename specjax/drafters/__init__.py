"""Drafters: one file each, found by name.

A drafter's module has `build(config, target, rngs)`, which makes one from the
plain values of a configuration's `draft` section, its length `k` among them,
and from the sizes of the target, a `TransformerConfig`.

Beside the methods of `types.Drafter`, and of `types.Trainable` if it is to be
trained, a drafter may have

- `taps`, layers of the target whose streams it reads (`types.taps`);
- `warp`, which what decodes sets to the target's;
- `begin(target)`, the drafter as training begins with it;
- `tree(nodes)`, the same weights as a tree of so many nodes;
- `model`, a language model of its own, which can write text without the target;
- `vocabulary`, the ids that it may draft, if these are not all, and then, if it
  is trained, `unembed_vocabulary(features)`, the logits of these alone.
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
