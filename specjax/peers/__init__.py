"""Who decodes in a `comparison`: we, and what users would pick instead.

A file each. What the others need comes with the extra `peers`, and is imported
when a decoder is made: without it everything here can be imported all the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from specjax.comparison import OURS, PLAIN, Arm, Condition, Decode
from specjax.contest import Way
from specjax.peers import llama_cpp, own, transformers
from specjax.tokenizers import Tokenizer

# Each has `NEEDS`, its packages; `place`, where it finds a target in a run;
# `export`, which puts it there; and its `Decoder`.
OTHERS = {'transformers': transformers, 'llama.cpp': llama_cpp}
INSTALL = "pip install '.[peers]'"


class Decoder(Protocol):
  """A target that was opened by one of them, and its ways to draft."""

  def arm(self, way: Way | None, condition: Condition) -> Decode | None:
    """What decodes in a way, or plainly; None where it has no such way."""

  def versions(self) -> dict[str, str]:
    """What a measurement depends on."""


def find(
  folder: Path, ours: own.Decoder, tokenizer: Tokenizer, threads: int, size: int
) -> tuple[dict[str, Decoder], dict[str, str]]:
  """Exports our models to those who are installed, and opens them there.

  Args:
    folder: of the run.
    ours: with what we decode.
    tokenizer: of its target.
    threads: of every pass.
    size: tokens of the longest text, drafts included.

  Returns:
    Decoders by name, ours first; and by the names of others why they are left
    out.
  """
  found: dict[str, Decoder] = {OURS: ours}
  left_out = {}
  for name, peer in OTHERS.items():
    missing = [p for p in peer.NEEDS if not importlib.util.find_spec(p)]
    if missing:
      left_out[name] = f'{", ".join(missing)} not installed: {INSTALL}'
      continue
    try:
      drafts = peer.export(folder, ours, tokenizer)
    except ValueError as error:  # not everything can be exported
      left_out[name] = str(error)
      continue
    place, dtype = peer.place(folder), ours.target.config.dtype
    found[name] = peer.Decoder(place, dtype, threads, size, drafts)
  return found, left_out


def enter(
  decoders: Mapping[str, Decoder], ways: Sequence[Way], condition: Condition
) -> dict[Arm, Decode]:
  """What decodes in each arm: plainly, and in the ways that each peer has.

  Args:
    decoders: by name.
    ways: to draft.
    condition: to decode under.
  """
  arms = {}
  for way in (None, *ways):
    for name, decoder in decoders.items():
      decode = decoder.arm(way, condition)
      if decode is not None:
        arms[Arm(name, way.name if way else PLAIN)] = decode
  return arms
