"""The page that says what a model is: README.md beside its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax import runs

UNKNOWN = 'unknown'
_LICENCE = re.compile(r'^license:[ \t]*(\S+)', re.M)


def licence(text: str) -> str:
  """What the head of a card says, or `UNKNOWN`."""
  head = text.split('---')[1] if text.startswith('---') else ''
  found = _LICENCE.search(head)
  return found[1].strip('\'"') if found else UNKNOWN


def write(
  folder: Path,
  *,
  name: str,
  target: str,
  target_licence: str,
  kind: str,
  parameters: int,
  figures: Mapping[str, float],
  temperature: float,
  config: Mapping[str, Any],
) -> None:
  """Writes the card of a draft.

  Args:
    folder: of the model.
    name: of the draft.
    target: the model that it drafts for.
    target_licence: of that; the draft was made from what it says, so it is
      this one's too.
    kind: of model, in the words of Hugging Face.
    parameters: how many it has.
    figures: what was measured, by name.
    temperature: that it was measured at.
    config: what it was made with, JSON values.
  """
  known = target_licence != UNKNOWN
  head = ['---', *([f'license: {target_licence}'] if known else [])]
  head += [
    'library_name: transformers',
    'pipeline_tag: text-generation',
    'tags: [speculative-decoding, draft-model, specjax]',
    '---',
  ]
  under = (
    f'It was distilled from that model, whose licence is {target_licence}.'
    if known
    else 'It was distilled from that model. What licence that has is not on'
    ' record: look it up before you pass this on.'
  )
  repository, _, revision = target.partition('@')
  arguments = f"'{repository}'" + f", revision='{revision}'" * bool(revision)
  lines = [
    *head,
    f'# {name}: a draft for {target}',
    '',
    f'A {kind} of {parameters:,} parameters that drafts for {target} in'
    f' speculative decoding. {under} It is of little use by itself.',
    '',
    '```python',
    'from transformers import AutoModelForCausalLM',
    '',
    f'target = AutoModelForCausalLM.from_pretrained({arguments})',
    f"draft = AutoModelForCausalLM.from_pretrained('{name}')",
    'target.generate(ids, assistant_model=draft)',
    '```',
    '',
    '## Measured',
    '',
    f'On text that the target wrote at temperature {temperature:g} and that is'
    ' none of the text which the draft was trained on.',
    '',
    '| | |',
    '|---|---|',
    *(f'| {key} | {value:.4g} |' for key, value in figures.items()),
    '',
    '## Made with',
    '',
    '```json',
    json.dumps(runs.portable(config), indent=2),
    '```',
    '',
  ]
  (folder / 'README.md').write_text('\n'.join(lines))
