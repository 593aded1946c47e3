"""Speedup on prompt files, task by task: `eval/speedup.py --prompts=FILE`."""

import itertools

import rich.box
import rich.console
import rich.table

from specjax import benchmark, certify, contest, plots, prompts, runs


def measure(workspace, path, arms, count):
  """Measures, writes, prints.

  Args:
    workspace: the run.
    path: of the prompts.
    arms: ways to draft, as texts.
    count: prompts of each task, at most.

  Returns:
    The exit code: 1 if greedy text is not plain text.
  """
  config = workspace.config
  decode, c = config['decode'], config['speedup']
  ways = [contest.parse(text, decode['k']) for text in arms]
  missing = workspace.missing([name for way in ways for name in way.folders])
  if missing:
    raise FileNotFoundError(
      f'{workspace.folder} has no draft {", ".join(missing)}: train it, or'
      ' leave it out of --arms'
    )
  texts = prompts.by_task(prompts.load(path), count)
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
    'device': runs.device(),
    'versions': runs.versions(),
    'prompts': str(path),
    'rows': rows,
    'config': config,
  }
  folder = workspace.folder
  runs.write_json(folder / 'tasks.json', runs.portable(report))
  picture = plots.by_task(folder / 'tasks.png', rows)
  show(rows, decode['max_new_tokens'])
  print('picture:', picture)
  print('numbers:', folder / 'tasks.json')
  exact = config['target']['dtype'] == 'float32'
  return 1 if exact and gap(rows) > certify.NEAR_TIE else 0


def show(rows, tokens):
  """Prints a table for each temperature."""
  console = rich.console.Console(highlight=False)
  console.width = max(console.width, 96)
  ordered = sorted(rows, key=lambda row: row['temperature'])  # a stable sort
  for t, some in itertools.groupby(ordered, lambda row: row['temperature']):
    console.print(f'\nT = {t:g}, batch 1, {tokens} tokens behind each prompt')
    table = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column('task', no_wrap=True)
    for column in ('prompts', 'tokens each'):
      table.add_column(column, justify='right')
    table.add_column('drafter', no_wrap=True)
    for column in ('accepted', 'tokens/round', r'speedup \[min–max]'):
      table.add_column(column, justify='right', no_wrap=True)
    for task, own in itertools.groupby(some, lambda row: row['task']):
      own = list(own)
      best = max(row['speedup'] for row in own)
      for i, row in enumerate(own):
        rate, length = row['acceptance'], row.get('prompt_tokens')
        about = [task, f'{row["prompts"]}', f'{length:.0f}' if length else '']
        table.add_row(
          *(about if i == 0 else [''] * 3),
          row['drafter'],
          '' if rate is None else f'{rate:.1%}',
          f'{row["tokens_per_round"]:.2f}',
          f'{row["speedup"]:.2f}x'
          rf' \[{row["speedup_min"]:.2f}–{row["speedup_max"]:.2f}]',
          style='bold' if row['speedup'] == best else None,
          end_section=i + 1 == len(own),
        )
    console.print(table)
  greedy = [row for row in rows if row['temperature'] == 0]
  if greedy and not any(row['mismatches'] for row in greedy):
    print('greedy text is identical to plain decoding, in every arm')
  elif greedy:
    tie = 'a near-tie' if gap(rows) <= certify.NEAR_TIE else 'NOT LOSSLESS'
    print(
      'greedy text leaves plain decoding; the two highest logits there differ'
      f' by at most {gap(rows):.2g}: {tie}'
    )


def gap(rows):
  """The widest gap of logits at which greedy text left plain text."""
  return max(
    (one['margin'] for row in rows for one in row['mismatches'] or ()),
    default=0.0,
  )
