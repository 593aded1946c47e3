"""Prompt files: questions in the layouts of public benchmarks.

Each line is a JSON object. Spec-Bench (Xia et al. 2024, arXiv 2401.07851) and
MT-Bench have `turns` and a `category`; GSM8K has a `question`; HumanEval a
`prompt`; others a `text`, and perhaps a `task`. Of several turns the first is
taken, for the second needs an answer to the first.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from specjax.tokenizers import Tokenizer

# The categories that Spec-Bench counts as one task.
_MT_BENCH = (
  'writing',
  'roleplay',
  'reasoning',
  'math',
  'coding',
  'extraction',
  'stem',
  'humanities',
)
_OF_MT_BENCH = range(81, 161)  # its ids there, and in MT-Bench itself
_KEYS = 'turns', 'question', 'prompt', 'text'  # by which a layout is known


class Prompt(NamedTuple):
  """What a model is asked.

  Attributes:
    task: what kind of question it is.
    text: the question.
  """

  task: str
  text: str


def load(path: str | os.PathLike) -> list[Prompt]:
  """Reads a file of prompts, in its order.

  Args:
    path: `.jsonl`, one object a line, or `.jsonl.gz`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is no prompt of a known layout, or there is none.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'there is no file of prompts {path}')
  opened = gzip.open if path.suffix == '.gz' else open
  found = []
  try:
    with opened(path, 'rt', encoding='utf-8') as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          found.append(_parse(line, f'{path}, line {number}', path))
  except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  if not found:
    raise ValueError(f'{path} has no prompts')
  return found


def by_task(prompts: Sequence[Prompt], count: int) -> dict[str, list[str]]:
  """Up to `count` texts of each task, evenly spread over its prompts."""
  tasks = {}
  for prompt in prompts:
    tasks.setdefault(prompt.task, []).append(prompt.text)
  return {
    task: [texts[i * len(texts) // count] for i in range(count)]
    if len(texts) > count
    else texts
    for task, texts in tasks.items()
  }


def encode(text: str, tokenizer: Tokenizer) -> list[int]:
  """A question as its model wants it: as a chat where it has a template."""
  if tokenizer.template:
    return tokenizer.chat([{'role': 'user', 'content': text}])
  return tokenizer.start + tokenizer.encode(text)


def cut(
  texts: Iterable[Sequence[int]], count: int, length: int, where: str
) -> list[list[int]]:
  """Prompts of one length, cut from texts as if these were one.

  Args:
    texts: token ids of each, of any lengths.
    count: prompts.
    length: tokens of each.
    where: the texts are from, for the message.

  Raises:
    ValueError: the texts have fewer tokens.
  """
  tokens = [token for text in texts for token in text]
  if len(tokens) < count * length:
    raise ValueError(
      f'{where} has {len(tokens)} tokens, too few for {count} prompts of'
      f' {length}'
    )
  return [tokens[i * length : (i + 1) * length] for i in range(count)]


def _parse(line: str, where: str, path: pathlib.Path) -> Prompt:
  try:
    one = json.loads(line)
  except ValueError as error:
    raise ValueError(f'{where} is not JSON: {error}') from error
  key, text = next(_texts(one), (None, None))
  if text is None:
    keys = ', '.join(one) if isinstance(one, dict) else 'no object'
    raise ValueError(
      f'{where} is no prompt: it has {keys}, and needs a text as'
      f' {" or ".join(_KEYS)}'
    )
  stem = path.name.removesuffix('.gz').removesuffix('.jsonl')
  of_it = one.get('question_id') in _OF_MT_BENCH
  if key == 'turns' and of_it and one.get('category') in _MT_BENCH:
    return Prompt('mt_bench', text)
  return Prompt(str(one.get('category') or one.get('task') or stem), text)


def _texts(one: Any) -> Iterator[tuple[str, str]]:
  """The keys of a line that have a text, and it; of turns the first."""
  for key in _KEYS:
    text = one.get(key) if isinstance(one, dict) else None
    if key == 'turns' and isinstance(text, list) and text:
      text = text[0]
    if isinstance(text, str) and text:
      yield key, text
