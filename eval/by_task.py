"""Speedup on prompt files, task by task: `eval/speedup.py --prompts=FILE`."""

import itertools

from specjax import (
  benchmark,
  certify,
  contest,
  plots,
  printing,
  prompts,
  runs,
  verify,
)

OUTPUT, ROWS = 'tasks.json', 'rows'


def parse(arms, k):
  """Ways to draft of their texts; `k` is the size where none is said."""
  return [contest.parse(text, k) for text in arms]


def read(path, count):
  """Up to `count` texts of each task in a file."""
  if count < 1:
    raise ValueError(f'--count is {count}: at least 1')
  return prompts.by_task(prompts.load(path), count)


def measure(workspace, texts, ways, about):
  """Measures, writes, prints.

  Args:
    workspace: the run.
    texts: of prompts, by task.
    ways: to draft.
    about: what else the report says.

  Returns:
    The report, and whether greedy text is not plain text where it should be.
  """
  config = workspace.config
  decode, c = config['decode'], config['speedup']
  tokens = {
    task: [prompts.encode(text, workspace.tokenizer) for text in some]
    for task, some in texts.items()
  }
  rows = benchmark.run(
    workspace,
    tokens,
    ways,
    temperatures=c['temperatures'],
    max_new_tokens=decode['max_new_tokens'],
    repeats=c['repeats'],
  )
  report = {
    **about,
    'versions': runs.versions(),
    'lossy': verify.is_lossy(decode['verify']),
    ROWS: rows,
    'config': config,
  }
  folder = workspace.folder
  runs.write_json(folder / OUTPUT, runs.portable(report))
  picture = plots.by_task(folder / 'tasks.png', rows)
  show(report)
  print('picture:', picture)
  print('numbers:', folder / OUTPUT)
  return report, is_lost(report)


def show(report):
  """Prints a table for each temperature."""
  rows, decode = report['rows'], report['config']['decode']
  tokens, length = decode['max_new_tokens'], decode['draft_length']
  console = printing.console(96)
  ordered = sorted(rows, key=lambda row: row['temperature'])  # a stable sort
  for t, some in itertools.groupby(ordered, lambda row: row['temperature']):
    console.print(
      f'\nT = {t:g}, batch 1, {tokens} tokens behind each prompt,'
      ' whatever ends there'
      + ('' if length == 'fixed' else f'; lengths: {length}')
    )
    table = printing.table('task', numbers=('prompts', 'of tokens'))
    printing.add(table, 'drafter', justify='left')
    printing.add(table, 'accepted', 'tokens/round', 'speedup [min–max]')
    for task, own in itertools.groupby(some, lambda row: row['task']):
      own = list(own)
      best = max(row['speedup'] for row in own)
      for i, row in enumerate(own):
        rate, mean = row['acceptance'], row.get('prompt_tokens')
        about = [task, f'{row["prompts"]}', f'{mean:.0f}' if mean else '']
        table.add_row(
          *(about if i == 0 else [''] * 3),
          row['drafter'],
          '' if rate is None else f'{rate:.1%}',
          f'{row["tokens_per_round"]:.2f}',
          printing.gain(row),
          style='bold' if row['speedup'] == best else None,
          end_section=i + 1 == len(own),
        )
    console.print(table)
  if report['lossy']:
    name = report['config']['decode']['verify']
    print(f'LOSSY: {name} does not keep the law of the target')
  elif 0 in [row['temperature'] for row in rows]:
    said = 'greedy text is identical to plain decoding, in every arm'
    if gap(rows):
      said = (
        'greedy text leaves plain decoding; the two highest logits there differ'
        f' by at most {gap(rows):.2g}'
        + (': NOT LOSSLESS' if is_lost(report) else ', a near-tie')
      )
    print(said)


def is_lost(report):
  """Whether greedy text differs by more than float32 rounds."""
  exact = report['config']['target']['dtype'] == 'float32'
  lossy = report['lossy']
  return exact and not lossy and gap(report['rows']) > certify.NEAR_TIE


def gap(rows):
  """The widest gap of logits at which greedy text left plain text."""
  return max(
    (one['margin'] for row in rows for one in row['mismatches'] or ()),
    default=0.0,
  )
