"""Packages that only some users need, imported when they are."""

from __future__ import annotations

import importlib
import types


def require(name: str, extra: str) -> types.ModuleType:
  """Imports a package that one of our extras brings.

  Args:
    name: of the package.
    extra: of specjax, as in `pip install 'specjax[hf]'`.

  Raises:
    ImportError: it is not installed; the message says how to.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ImportError(
      f"this needs the package {name} ({error}): pip install '.[{extra}]'"
    ) from error
