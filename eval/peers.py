"""Speculative decoding beside that of transformers and of llama.cpp.

    pip install '.[peers]'
    python eval/peers.py
    python eval/peers.py --prompts=question.jsonl --count=2 --tokens=64
    python eval/peers.py --arms=ngram@4,early_exit:1@3,model:draft@4
    python eval/peers.py --contexts=256,1024 --batches=1,4 --top_p=.95 \\
        --dtypes=float32,bfloat16

Without arguments it takes the newest run, and prompts from its text; of files
`specjax.prompts` says how they may look.

Every one decodes the same prompts with the same weights on the same CPUs, in
turns, plainly and in each way to draft that it has, with drafts of one length.
In all of them `ngram` is prompt lookup (here it takes the latest match, there
the first); in transformers `model:DRAFT` is `assistant_model` and
`early_exit:N` is `assistant_early_exit`. Nothing ends a text early. At T = 0
all should write one text, up to near-ties; at T = 1 each draws its own. The
temperatures are those of `config.speedup`.

The first token is timed alone too, with the prompt's pass before it, plainly:
rates and ratios of all ways are of what comes behind that. `begin` is what an
arm's first calls took, compiling included where nothing before had the same
program; the peak memory is that of a process that decodes the longest prompt
plainly, interpreter and libraries included. In other `--dtypes` than the run's,
draft models follow; heads and other drafts stay as they were trained.

Writes `peers.json` and `peers.png` into the run, and into its folder `peers/`
the weights as the others read them. Who is not installed is left out.
"""

import itertools

from absl import flags

from specjax import (
  comparison,
  contest,
  experiment,
  generation,
  peers,
  plots,
  printing,
  runs,
  sweep,
)
from specjax.comparison import ALL, PLAIN
from specjax.peers import inputs, memory, own
from specjax.workspace import Workspace

ARMS = flags.DEFINE_list(
  'arms', ['ngram'], 'ways to draft beside plain decoding, kind:draft@size'
)
TOKENS = flags.DEFINE_integer(
  'tokens', None, 'new ones of a prompt (default: config.decode)'
)
PROMPTS = flags.DEFINE_string(
  'prompts', None, "file of prompts (default: from the run's text)"
)
COUNT = flags.DEFINE_integer('count', 8, 'prompts, of each task in a file')
CONTEXTS = flags.DEFINE_list(
  'contexts',
  [],
  'tokens of a text with its new ones: prompts are then cut from all of a file,'
  ' or begin documents, --count in all (default: prompts as they are)',
)
BATCHES = flags.DEFINE_list(
  'batches', ['1'], 'prompts that are decoded at once'
)
DTYPES = flags.DEFINE_list(
  'dtypes', [], "of weights and caches (default: the target's)"
)
TOP_P = flags.DEFINE_float('top_p', 1.0, 'probability kept, above T = 0')
REPEATS = flags.DEFINE_integer('repeats', 3, 'timings of each, in turns')
THREADS = flags.DEFINE_integer(
  'threads', None, 'and CPUs, of everyone (default: all)'
)

NEAR_TIE = 1e-3  # of logits: others sum in another order, layer after layer


def main(config, folder):
  """Exports, measures, writes, prints."""
  config = config.to_dict()
  if TOKENS.value is not None:
    config['decode']['max_new_tokens'] = TOKENS.value
  dtypes = [*dict.fromkeys(DTYPES.value)] or [config['target']['dtype']]
  new = config['decode']['max_new_tokens']
  contexts = ()
  if CONTEXTS.value:
    contexts = experiment.numbers('--contexts', CONTEXTS.value)
  batches = experiment.numbers('--batches', BATCHES.value)
  inputs.check(
    contexts=contexts,
    batches=batches,
    dtypes=dtypes,
    count=COUNT.value,
    repeats=REPEATS.value,
    new=new,
    top_p=TOP_P.value,
  )
  threads = inputs.take_threads(THREADS.value)
  workspace = Workspace.look_at(folder, config)
  ways = [contest.parse(text, config['decode']['k']) for text in ARMS.value]
  contest.require(workspace, ways)
  prompts = {
    context: inputs.read_prompts(workspace, PROMPTS.value, COUNT.value, context)
    for context in contexts or (0,)
  }
  every = [
    prompt
    for tasks in prompts.values()
    for some in tasks.values()
    for prompt in some
  ]
  lengths = [len(prompt) + new for prompt in every]
  generation.require_positions(workspace.target(), lengths)
  longest = max(every, key=len)
  size = len(longest) + new + max((way.k or 0 for way in ways), default=0) + 1
  rows, left_out = [], {}
  for dtype in dtypes:
    ours = own.load(workspace, ways, dtype)
    decoders, out = peers.find(folder, ours, workspace.tokenizer, threads, size)
    left_out |= out
    for name, why in out.items():
      print(f'{name} is left out: {why}')
    versions = {}
    for decoder in decoders.values():
      versions |= decoder.versions()
    peaks = {
      name: memory.measure(name, folder, dtype, longest, new, threads)
      for name in decoders
    }
    for context, batch, t in itertools.product(
      prompts, dict.fromkeys(batches), config['speedup']['temperatures']
    ):
      top_p = TOP_P.value if t else 1.0
      condition = comparison.Condition(dtype, context, batch, t, top_p)
      found = comparison.measure(
        ours.target,
        peers.enter(decoders, ways, condition),
        {
          task: sweep.groups(some, batch, len(some))
          for task, some in prompts[context].items()
        },
        new,
        condition,
        repeats=REPEATS.value,
      )
      rows += [{**row, 'peak_bytes': peaks[row['peer']]} for row in found]
      report = {
        'device': runs.device(),
        'threads': threads,
        'versions': versions,
        'file': PROMPTS.value,
        'tokens': new,
        'repeats': REPEATS.value,
        'left_out': left_out,
        'rows': rows,
        'config': config,
      }
      # After each condition, for the next may take long.
      runs.write_json(folder / 'peers.json', runs.portable(report))
  whole = [row for row in rows if row['task'] == ALL]
  picture = plots.peers(folder / 'peers.png', whole)
  show(report)
  print('picture:', picture)
  print('numbers:', folder / 'peers.json')


def show(report):
  """Prints a table for each condition, and one of its tasks if it has such."""
  console = printing.console(132)  # of the widest table
  for label in dict.fromkeys(row['condition'] for row in report['rows']):
    every = [row for row in report['rows'] if row['condition'] == label]
    rows = [row for row in every if row['task'] == ALL]
    greedy = rows[0]['temperature'] == 0
    console.print(
      f'\n{label}: {rows[0]["prompts"]} prompts of'
      f' {rows[0]["prompt_tokens"]:.0f} tokens, {report["tokens"]} new ones'
      f' each, threads: {report["threads"]}'
    )
    numbers = 'first token', 'tokens/s', 'tokens/pass', 'over its own plain'
    numbers += 'over plain specjax', 'begin', 'memory'
    numbers += ('greedy text',) if greedy else ()
    table = printing.table('', 'way', numbers=numbers)
    best = max(row['speedup'] for row in rows)
    for row in rows:
      peak = row['peak_bytes']
      table.add_row(
        row['peer'],
        row['way'],
        f'{1e3 * row["first_token_seconds"]:,.0f} ms',
        f'{row["tokens_per_second"]:,.1f}',
        f'{row["tokens_per_pass"]:.2f}',
        printing.gain(row, 'own_speedup'),
        printing.gain(row),
        f'{row["begin_seconds"]:.1f} s',
        f'{peak / 1e9:.2f} GB' if peak and row['way'] == PLAIN else '',
        *([identity(row)] if greedy else []),
        style='bold' if row['speedup'] == best else None,
      )
    console.print(table)
    if len(rows) < len(every):
      console.print(by_task(every))
  said = (
    'medians of repeats in turns [min–max], of the tokens behind the first;'
    " tokens/pass: of the target's passes that give tokens; memory: at most, of"
    ' a process of its own; greedy text: beside that of plain specjax, the'
    ' first new token that differs, and the gap of the top two logits there'
  )
  console.print(said, markup=False)
  for name, why in report['left_out'].items():
    console.print(f'{name} is left out: {why}', markup=False)


def by_task(rows):
  """A table of tokens per second of every arm and task, and of its gain."""
  tasks = [*dict.fromkeys(row['task'] for row in rows)]
  table = printing.table('tokens/s, over plain specjax', numbers=tasks)
  for arm in dict.fromkeys((row['peer'], row['way']) for row in rows):
    some = [row for row in rows if (row['peer'], row['way']) == arm]
    table.add_row(
      ' '.join(arm),
      *(
        f'{row["tokens_per_second"]:.1f} {row["speedup"]:.2f}x' for row in some
      ),
    )
  return table


def identity(row):
  """Whether greedy text is ours; sums in bfloat16 differ by more than ties."""
  if not row['mismatches']:
    return 'same'
  worst = max(row['mismatches'], key=lambda found: found['margin'])
  said = 'tie' if worst['margin'] <= NEAR_TIE else 'NO'
  if row['dtype'] != 'float32':
    said = 'off'
  same = row['prompts'] - len(row['mismatches'])
  return (
    f'{same} of {row["prompts"]} same; {said} at'
    f' {worst["position"]}, {worst["margin"]:.1g}'
  )


if __name__ == '__main__':
  experiment.app(main)
