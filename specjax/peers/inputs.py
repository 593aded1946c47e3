"""What a comparison is given: sizes that go together, prompts, CPUs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import jax

from specjax import corpora, products, prompts
from specjax.comparison import ALL
from specjax.workspace import Workspace

LONGER = 16  # new tokens, at least, of which the first is timed alone


def check(
  *,
  contexts: Sequence[int],
  batches: Sequence[int],
  dtypes: Sequence[str],
  count: int,
  repeats: int,
  new: int,
  top_p: float,
) -> None:
  """Refuses what makes no sense, before anything is done.

  Args:
    contexts: tokens of a text with its new ones; none are prompts as they are.
    batches: prompts that are decoded at once.
    dtypes: of weights and caches.
    count: prompts, of each task or of a context.
    repeats: timings of each arm.
    new: tokens behind each prompt.
    top_p: probability that is kept.

  Raises:
    ValueError: it does not.
  """
  for name, value in (('--count', count), ('--repeats', repeats)):
    if value < 1:
      raise ValueError(f'{name} is {value}: at least 1')
  if new < LONGER:
    raise ValueError(
      f'--tokens, or decode.max_new_tokens, is {new}: at least {LONGER}, since'
      ' the first is timed alone'
    )
  if not 0 < top_p <= 1:
    raise ValueError(f'--top_p is {top_p}: above 0, and 1 at most')
  for dtype in dtypes:
    if dtype not in products.DTYPES:
      raise ValueError(
        f'--dtypes has {dtype!r}: use {" or ".join(products.DTYPES)}'
      )
  for batch in batches:
    if batch > 1 and not contexts:
      raise ValueError(
        f'--batches has {batch}, and prompts of one batch must be as long as'
        ' one another: give --contexts'
      )
    if count % batch:
      raise ValueError(
        f'--count is {count}, which is no multiple of a batch of {batch}'
      )
  for context in contexts:
    if context <= new:
      raise ValueError(
        f'--contexts has {context}, and {new} of it are new tokens: give more,'
        ' or fewer --tokens'
      )


def read_prompts(
  workspace: Workspace, path: str | None, count: int, context: int
) -> dict[str, list[list[int]]]:
  """Token ids of what is decoded behind, by task.

  Args:
    workspace: the run, with `decode.max_new_tokens` to be decoded.
    path: file of prompts; None begins documents of the run's text.
    count: prompts, of each task or of the context.
    context: tokens of every text with its new ones, for which prompts are cut
      from all of a file, and are of no task; 0 takes them as they are.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is no text, or not enough, or it is no file of prompts.
  """
  decoding = workspace.config['decode']
  length = decoding['prompt_length']
  if context:
    length = context - decoding['max_new_tokens']
  if not path:
    if workspace.corpus.name == corpora.NONE:
      raise ValueError(
        f'{workspace.folder} has no text to take prompts from: name a file with'
        ' --prompts'
      )
    return {ALL: workspace.prompts('test', count, length)}
  found = prompts.load(path)
  tasks = prompts.by_task(found, len(found) if context else count)
  tokens = {
    task: [prompts.encode(text, workspace.tokenizer) for text in texts]
    for task, texts in tasks.items()
  }
  if not context:
    return tokens
  every = itertools.chain(*tokens.values())
  return {ALL: prompts.cut(every, count, length, path)}


def take_threads(wanted: int | None) -> int:
  """Keeps this process, whoever computes in it, to so many CPUs.

  Must come before the first computation: XLA has as many threads as it has
  CPUs when it starts.

  Args:
    wanted: CPUs; None is all that the process has.

  Returns:
    How many these are.

  Raises:
    ValueError: there are not so many, or JAX computes elsewhere.
  """
  cpus = sorted(os.sched_getaffinity(0))
  wanted = len(cpus) if wanted is None else wanted
  if not 1 <= wanted <= len(cpus):
    raise ValueError(f'--threads is {wanted}, of {len(cpus)} CPUs')
  os.sched_setaffinity(0, cpus[:wanted])
  if jax.default_backend() != 'cpu':
    raise ValueError(
      f'JAX computes on {jax.default_backend()} and the others on the CPU: set'
      ' JAX_PLATFORMS=cpu'
    )
  return wanted
