"""Functions by the names that a configuration gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def function(
  name: str, known: Mapping[str, Callable[..., Any]], what: str
) -> Callable[..., Any]:
  """The function of a name.

  Args:
    name: a key of `known`, or 'module:function' for one of your own.
    known: those that come with specjax.
    what: such a function is, for the message.

  Raises:
    ValueError: there is none.
  """
  if name in known:
    return known[name]
  module, colon, attribute = name.partition(':')
  try:
    if colon and module:
      return getattr(importlib.import_module(module), attribute)
  except ModuleNotFoundError as error:
    if not f'{module}.'.startswith(f'{error.name}.'):
      raise  # it exists, and lacks something of its own
  except AttributeError:
    pass
  raise ValueError(
    f'there is no {what} {name!r}: take one of {", ".join(known)}, or'
    ' module:function'
  )
