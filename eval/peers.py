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

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.box
import rich.console
import rich.table
from absl import flags

from specjax import (
  benchmark,
  contest,
  corpora,
  decode,
  experiment,
  generation,
  logs,
  plots,
  pricing,
  products,
  runs,
  sweep,
  timing,
  verify,
  warps,
)
from specjax import prompts as prompt_files
from specjax.drafters.none import NoDrafter
from specjax.models import gguf, huggingface
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
ALONE = flags.DEFINE_string(
  'alone', None, 'only decode plainly with this one, for its peak memory'
)

OURS, PLAIN, ALL = 'specjax', 'plain', benchmark.ALL
NEAR_TIE = 1e-3  # of logits: others sum in another order, layer after layer
INSTALL = "pip install '.[peers]'"
NEEDS = {
  'transformers': ('torch', 'transformers', 'safetensors'),
  'llama.cpp': ('llama_cpp', 'gguf'),
}
LONGER = 16  # new tokens, at least, of which the first is timed alone


class Arm(NamedTuple):
  """Who decodes, and how."""

  peer: str
  way: str


class Condition(NamedTuple):
  """Under which all arms decode; `context` 0 is prompts as they are."""

  dtype: str
  context: int
  batch: int
  temperature: float
  top_p: float

  @property
  def label(self):
    """For people."""
    parts = [f'T = {self.temperature:g}']
    if self.top_p < 1:
      parts.append(f'top-p {self.top_p:g}')
    parts += [f'batch {self.batch}', self.dtype]
    if self.context:
      parts.append(f'context {self.context:,}')
    return ', '.join(parts)

  @property
  def warp(self):
    """Of target and drafts."""
    kept = [warps.TopP(self.top_p)] if self.top_p < 1 else []
    return warps.compose(warps.temperature(self.temperature), *kept)


class Text(NamedTuple):
  """What one arm wrote behind a batch of prompts.

  Attributes:
    tokens: the new ones, of each.
    passes: of the target that gave them.
  """

  tokens: list[list[int]]
  passes: int


def main(config, folder):
  """Exports, measures, writes, prints."""
  config = config.to_dict()
  if TOKENS.value is not None:
    config['decode']['max_new_tokens'] = TOKENS.value
  dtypes = [*dict.fromkeys(DTYPES.value)] or [config['target']['dtype']]
  new = config['decode']['max_new_tokens']
  contexts, batches = check_sizes(new, dtypes)
  threads = take_threads(THREADS.value)
  workspace = Workspace.look_at(folder, config)
  ways = [contest.parse(text, config['decode']['k']) for text in ARMS.value]
  contest.require(workspace, ways)
  prompts = {size: read_prompts(workspace, size) for size in contexts}
  if ALONE.value:
    print(json.dumps(alone(workspace, dtypes[0], prompts, threads)))
    return
  every = [one for tasks in prompts.values() for one in tasks.values()]
  lengths = [len(prompt) + new for prompt in itertools.chain(*every)]
  generation.require_positions(workspace.target(), lengths)
  size = max(lengths)
  size += max((way.k or 0 for way in ways), default=0) + 1
  rows, left_out = [], {}
  for dtype in dtypes:
    target, drafters = cast(workspace, ways, dtype)
    peers, out = find(folder, target, workspace.tokenizer, threads, size)
    left_out |= out
    memory = {name: peak_memory(name, folder, dtype) for name in (OURS, *peers)}
    drafts = {}
    if 'transformers' in peers:
      drafts = export(folder, drafters, workspace.tokenizer)
    for context, batch, t in itertools.product(
      contexts, batches, config['speedup']['temperatures']
    ):
      top_p = TOP_P.value if t else 1.0
      condition = Condition(dtype, context, batch, t, top_p)
      arms = enter(target, ways, drafters[t], peers, drafts, condition)
      groups = {
        task: sweep.groups(own, batch, len(own))
        for task, own in prompts[context].items()
      }
      for row in measure(target, arms, groups, new, condition):
        rows.append({**row, 'peak_bytes': memory[row['peer']]})
      report = {
        'device': runs.device(),
        'threads': threads,
        'versions': runs.versions() | versions(peers),
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


def check_sizes(new, dtypes):
  """Contexts and batches, refused before anything is done."""
  contexts = [0]
  if CONTEXTS.value:
    found = experiment.numbers('--contexts', CONTEXTS.value)
    contexts = [*dict.fromkeys(found)]
  batches = [*dict.fromkeys(experiment.numbers('--batches', BATCHES.value))]
  for name, value in (('--count', COUNT.value), ('--repeats', REPEATS.value)):
    if value < 1:
      raise ValueError(f'{name} is {value}: at least 1')
  if new < LONGER:
    raise ValueError(
      f'--tokens, or decode.max_new_tokens, is {new}: at least {LONGER}, since'
      ' the first is timed alone'
    )
  if not 0 < TOP_P.value <= 1:
    raise ValueError(f'--top_p is {TOP_P.value}: above 0, and 1 at most')
  for dtype in dtypes:
    if dtype not in products.DTYPES:
      raise ValueError(
        f'--dtypes has {dtype!r}: use {" or ".join(products.DTYPES)}'
      )
  for batch in batches:
    if batch > 1 and contexts == [0]:
      raise ValueError(
        f'--batches has {batch}, and prompts of one batch must be as long as'
        ' one another: give --contexts'
      )
    if COUNT.value % batch:
      raise ValueError(
        f'--count is {COUNT.value}, which is no multiple of a batch of {batch}'
      )
  for context in contexts:
    if CONTEXTS.value and context <= new:
      raise ValueError(
        f'--contexts has {context}, and {new} of it are new tokens: give more,'
        ' or fewer --tokens'
      )
  return contexts, batches


def read_prompts(workspace, context):
  """Token ids of what is decoded behind, by task.

  In contexts all are as long, and of no task.
  """
  decoding, count = workspace.config['decode'], COUNT.value
  length = decoding['prompt_length']
  if context:
    length = context - decoding['max_new_tokens']
  if not PROMPTS.value:
    if workspace.corpus.name == corpora.NONE:
      raise ValueError(
        f'{workspace.folder} has no text to take prompts from: name a file with'
        ' --prompts'
      )
    return {ALL: workspace.prompts('test', count, length)}
  found = prompt_files.load(PROMPTS.value)
  tasks = prompt_files.by_task(found, len(found) if context else count)
  prompts = {
    task: [prompt_files.encode(text, workspace.tokenizer) for text in texts]
    for task, texts in tasks.items()
  }
  if not context:
    return prompts
  text = [*itertools.chain(*itertools.chain(*prompts.values()))]
  if len(text) < count * length:
    raise ValueError(
      f'{PROMPTS.value} has {len(text)} tokens, too few for {count} prompts of'
      f' {length}'
    )
  return {ALL: [text[i * length : (i + 1) * length] for i in range(count)]}


def take_threads(wanted):
  """Keeps this process, whoever computes in it, to so many CPUs.

  Must come before the first computation: XLA has as many threads as it has
  CPUs when it starts.

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


def cast(workspace, ways, dtype):
  """The target, and what drafts by temperature and way, with such weights."""
  drafters: dict[float, dict[contest.Way, Any]] = {}
  for t in workspace.config['speedup']['temperatures']:
    drafters[t] = {way: way.drafter(workspace, t) for way in ways}
    for way, drafter in drafters[t].items():
      if has_model(way, drafter):
        model = drafter.model.cast(dtype)
        drafters[t][way] = dataclasses.replace(drafter, model=model)
  return workspace.target().cast(dtype), drafters


def has_model(way, drafter):
  """Whether a model of its own drafts, which others may load."""
  return way.kind == 'model' and hasattr(drafter, 'model')


def find(folder, target, tokenizer, threads, size):
  """Exports the target to those who are installed, and opens it there.

  Returns:
    Decoders by name, and by the names of the others why they are left out.
  """
  peers, left_out = {}, {}
  for name, packages in NEEDS.items():
    missing = [p for p in packages if not importlib.util.find_spec(p)]
    if missing:
      left_out[name] = f'{", ".join(missing)} not installed: {INSTALL}'
      continue
    place = exported(folder, name)
    try:
      if name == 'transformers':
        huggingface.save(target, place, tokenizer)
      else:
        gguf.save(target, place)
    except ValueError as error:  # not everything can be exported
      left_out[name] = str(error)
      continue
    peers[name] = load(name, place, target.config.dtype, threads, size)
  for name, why in left_out.items():
    print(f'{name} is left out: {why}')
  return peers, left_out


def exported(folder, name):
  """Where the target is for a peer."""
  last = 'target' if name == 'transformers' else 'target.gguf'
  return folder / 'peers' / last


def load(name, place, dtype, threads, size):
  """Opens the target in a peer."""
  if name == 'transformers':
    from peers import transformers_decode

    return transformers_decode.Decoder(place, dtype, threads)
  from peers import llama_cpp_decode

  return llama_cpp_decode.Decoder(place, dtype, threads, size)


def export(folder, drafters, tokenizer):
  """Folders of the ways' draft models, written anew."""
  folders = {}
  for way, drafter in next(iter(drafters.values())).items():
    if has_model(way, drafter):
      folders[way] = folder / 'peers' / way.draft
      huggingface.save(drafter.model, folders[way], tokenizer)
  return folders


def peak_memory(name, folder, dtype):
  """Bytes of a process that decodes plainly, or None where nobody knows."""
  done = subprocess.run(
    [
      sys.executable,
      *sys.argv,
      f'--workdir={folder}',
      f'--dtypes={dtype}',
      f'--alone={name}',
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(
      f'{name} by itself: {done.stderr.strip().rpartition(chr(10))[2]}'
    )
  return json.loads(done.stdout.splitlines()[-1])


def alone(workspace, dtype, prompts, threads):
  """Decodes the longest prompt plainly; the peak memory of this process."""
  every = itertools.chain(*(tasks.values() for tasks in prompts.values()))
  longest = max(itertools.chain(*every), key=len)
  count = workspace.config['decode']['max_new_tokens']
  if ALONE.value == OURS:
    if dtype == workspace.config['target']['dtype']:
      target = workspace.target()
    else:  # a copy beside the original would count too
      place = exported(workspace.folder, 'transformers')
      target = huggingface.load(place, dtype)
    ours(target, NoDrafter(), warps.Greedy(), [longest], 0, count, 0)
  else:
    place, size = exported(workspace.folder, ALONE.value), len(longest) + count
    decoder = load(ALONE.value, place, dtype, threads, size + 1)
    plainly = Condition(dtype, 0, 1, 0.0, 1.0)
    options = decoder.options(None, plainly)
    decoder.decode([longest], count, 0.0, 1.0, 0, **options)
  found = Path('/proc/self/status')
  if not found.exists():
    return None
  fields = dict(line.split(':', 1) for line in found.read_text().splitlines())
  return 1024 * int(fields['VmHWM'].split()[0])


def versions(peers):
  """Those of the peers."""
  found = {}
  for decoder in peers.values():
    found |= decoder.versions()
  return found


def ours(target, drafter, warp, prompts, seed, count, room):
  """Continues a batch of prompts here, in buffers of so much room at least."""
  state = generation.start(
    target,
    drafter,
    prompts,
    key=jax.random.key(seed),
    max_new_tokens=count,
    room=room,
  )
  state = generation.advance(
    target,
    drafter,
    verify.as_pytree(verify.rejection),
    warp,
    generation.end_ids(target, ()),  # nothing ends a text early
    state,
    decode.FOREVER,
  )
  result = generation.finish(state, [*map(len, prompts)])
  return Text(result.new_tokens(), int(result.stats.rounds.max()))


def enter(target, ways, drafters, peers, drafts, condition):
  """What decodes in each arm: functions of prompts, a seed and a count.

  Args:
    target: ours.
    ways: to draft, beside plain decoding.
    drafters: ours, by way.
    peers: decoders by name.
    drafts: folders of exported draft models, by way.
    condition: to decode under.
  """
  arms, warp = {}, condition.warp
  for way in (None, *ways):
    drafter = pricing.with_warp(drafters[way] if way else NoDrafter(), warp)
    label = way.name if way else PLAIN
    arms[Arm(OURS, label)] = functools.partial(ours, target, drafter, warp)
    for name, decoder in peers.items():
      options = decoder.options(way, condition, drafts.get(way))
      if options is not None:
        arms[Arm(name, label)] = functools.partial(
          theirs, decoder, options, condition
        )
  return arms


def theirs(decoder, options, condition, prompts, seed, count, room):
  """Continues a batch of prompts there, where buffers grow."""
  del room
  t, p = condition.temperature, condition.top_p
  return Text(*decoder.decode(prompts, count, t, p, seed, **options))


def measure(target, arms, tasks, count, condition):
  """The rows of a condition.

  Args:
    target: ours.
    arms: what decodes.
    tasks: batches of prompts, by task.
    count: new tokens of each.
    condition: to decode under.
  """
  firsts = [
    Arm(peer, PLAIN) for peer in dict.fromkeys(arm.peer for arm in arms)
  ]
  wanted = [*((arm, 1) for arm in firsts), *((arm, count) for arm in arms)]

  def room(group):
    # The first token's too, or its pass would read another buffer.
    return benchmark.room(max(map(len, group)) + count)

  def parts(arm, new, groups):
    return [
      functools.partial(arms[arm], group, seed, new, room(group))
      for seed, group in enumerate(groups)
    ]

  # One of each room: others have no programs, and need but one of all.
  rooms = {room(group): group for groups in tasks.values() for group in groups}
  begin = dict.fromkeys(arms, 0.0)
  title = f'{condition.label}: begin'
  with logs.Progress(len(wanted), title, unit='arms') as progress:
    for arm, new in wanted:
      groups = list(rooms.values())[: None if arm.peer == OURS else 1]
      start = time.perf_counter()
      for call in parts(arm, new, groups):
        call()
      begin[arm] += time.perf_counter() - start
      progress.advance()
  total = REPEATS.value * sum(map(len, tasks.values()))
  title = f'{condition.label}: decode'
  rows, whole = [], []
  with logs.Progress(total, title, unit='turns') as progress:
    for task, groups in tasks.items():
      calls = {(arm, new): parts(arm, new, groups) for arm, new in wanted}
      seconds, texts = timing.alternate(calls, REPEATS.value, progress.advance)
      found = {
        arm: {
          'first': np.array(seconds[Arm(arm.peer, PLAIN), 1]),
          'whole': np.array(seconds[arm, count]),
          'texts': texts[arm, count],
          'mismatches': None,
        }
        for arm in arms
      }
      if condition.temperature == 0:
        plain = found[Arm(OURS, PLAIN)]['texts']
        for one in found.values():
          one['mismatches'] = mismatches(target, groups, plain, one['texts'])
      whole.append((groups, found))
      if len(tasks) > 1:
        rows += rows_of(task, groups, found, condition)
  groups = [group for groups, _ in whole for group in groups]
  found = {arm: pooled([found[arm] for _, found in whole]) for arm in arms}
  rows += rows_of(ALL, groups, found, condition)
  return [
    {**row, 'begin_seconds': begin[Arm(row['peer'], row['way'])]}
    for row in rows
  ]


def pooled(parts):
  """What was found of all tasks, each as long as it took."""
  one, *rest = parts
  return {
    key: None if start is None else sum((p[key] for p in rest), start=start)
    for key, start in one.items()
  }


def rows_of(task, groups, found, condition):
  """The rows of a task: of what is behind the first token."""
  lengths = [len(prompt) for group in groups for prompt in group]
  behind = {arm: one['whole'] - one['first'] for arm, one in found.items()}
  rows = []
  for arm, one in found.items():
    taken, texts = behind[arm], one['texts']
    if taken.min() <= 0:
      raise RuntimeError(
        f'{arm.peer}, {arm.way}: a text took no longer than its first token:'
        ' the machine is too busy, or --tokens too few'
      )
    longest = [max(map(len, text.tokens)) for text in texts]
    new = sum(len(own) - 1 for text in texts for own in text.tokens)
    row: dict[str, Any] = {
      **arm._asdict(),
      **condition._asdict(),
      'condition': condition.label,
      'task': task,
      'prompts': len(lengths),
      'prompt_tokens': float(np.mean(lengths)),
      'first_token_seconds': float(np.median(one['first'])) / len(groups),
      'tokens_per_second': new / float(np.median(taken)),
      'tokens_per_pass': sum(longest) / sum(text.passes for text in texts),
      'seconds': taken.tolist(),
      'mismatches': one['mismatches'],
    }
    for key, peer in (('speedup', OURS), ('own_speedup', arm.peer)):
      spread = timing.ratio(behind[Arm(peer, PLAIN)], taken)
      row |= {
        key: spread.median,
        f'{key}_min': spread.min,
        f'{key}_max': spread.max,
      }
    rows.append(row)
  return rows


def mismatches(target, groups, plain, own):
  """Where greedy text leaves ours; positions are of new tokens, from 0."""
  prompts = [*itertools.chain(*groups)]

  def results(texts):
    new = itertools.chain(*(text.tokens for text in texts))
    return [
      generation.Result(
        np.array([[*prompt, *tokens]], np.int32),
        np.array([len(prompt) + len(tokens)]),
        np.array([len(prompt)]),
        None,
      )
      for prompt, tokens in zip(prompts, new, strict=True)
    ]

  found = sweep.mismatches(target, results(plain), results(own))
  return [
    {**one, 'position': one['position'] - len(prompts[one['prompt']])}
    for one in found
  ]


def show(report):
  """Prints a table for each condition, and one of its tasks if it has such."""
  console = rich.console.Console(highlight=False)
  console.width = max(console.width, 132)  # of the widest table
  for label in dict.fromkeys(row['condition'] for row in report['rows']):
    every = [row for row in report['rows'] if row['condition'] == label]
    rows = [row for row in every if row['task'] == ALL]
    greedy = rows[0]['temperature'] == 0
    console.print(
      f'\n{label}: {rows[0]["prompts"]} prompts of'
      f' {rows[0]["prompt_tokens"]:.0f} tokens, {report["tokens"]} new ones'
      f' each, threads: {report["threads"]}'
    )
    table = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column('', no_wrap=True)
    table.add_column('way', no_wrap=True)
    for column in (
      'first token',
      'tokens/s',
      'tokens/pass',
      'over its own plain',
      'over plain specjax',
      'begin',
      'memory',
      *(['greedy text'] if greedy else []),
    ):
      table.add_column(column, justify='right', no_wrap=True)
    best = max(row['speedup'] for row in rows)
    for row in rows:
      peak = row['peak_bytes']
      table.add_row(
        row['peer'],
        row['way'],
        f'{1e3 * row["first_token_seconds"]:,.0f} ms',
        f'{row["tokens_per_second"]:,.1f}',
        f'{row["tokens_per_pass"]:.2f}',
        spread(row, 'own_speedup'),
        spread(row, 'speedup'),
        f'{row["begin_seconds"]:.1f} s',
        f'{peak / 1e9:.2f} GB' if peak and row['way'] == PLAIN else '',
        *([identity(row, row['prompts'])] if greedy else []),
        style='bold' if row['speedup'] == best else None,
      )
    console.print(table)
    if len(rows) < len(every):
      show_tasks(console, every)
  said = (
    'medians of repeats in turns [min–max], of the tokens behind the first;'
    " tokens/pass: of the target's passes that give tokens; memory: at most, of"
    ' a process of its own; greedy text: beside that of plain specjax, the'
    ' first new token that differs, and the gap of the top two logits there'
  )
  notes = [
    said,
    *(f'{name} is left out: {why}' for name, why in report['left_out'].items()),
  ]
  for note in notes:
    console.print(note.replace('[', r'\['))


def show_tasks(console, rows):
  """Prints tokens per second of every arm and task, and its gain."""
  tasks = [*dict.fromkeys(row['task'] for row in rows)]
  table = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
  )
  table.add_column('tokens/s, over plain specjax', no_wrap=True)
  for task in tasks:
    table.add_column(task, justify='right', no_wrap=True)
  for arm in dict.fromkeys((row['peer'], row['way']) for row in rows):
    own = [row for row in rows if (row['peer'], row['way']) == arm]
    table.add_row(
      ' '.join(arm),
      *(f'{row["tokens_per_second"]:.1f} {row["speedup"]:.2f}x' for row in own),
    )
  console.print(table)


def spread(row, key):
  """A ratio and its range."""
  low, high = row[f'{key}_min'], row[f'{key}_max']
  return rf'{row[key]:.2f}x \[{low:.2f}–{high:.2f}]'


def identity(row, prompts):
  """Whether greedy text is ours; sums in bfloat16 differ by more than ties."""
  if not row['mismatches']:
    return 'same'
  worst = max(row['mismatches'], key=lambda found: found['margin'])
  said = 'tie' if worst['margin'] <= NEAR_TIE else 'NO'
  if row['dtype'] != 'float32':
    said = 'off'
  same = prompts - len(row['mismatches'])
  return (
    f'{same} of {prompts} same; {said} at'
    f' {worst["position"]}, {worst["margin"]:.1g}'
  )


if __name__ == '__main__':
  experiment.app(main)
