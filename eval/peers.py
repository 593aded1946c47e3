"""Speculative decoding beside that of transformers and of llama.cpp.

    pip install '.[peers]'
    python eval/peers.py
    python eval/peers.py --prompts=question.jsonl --count=2 --tokens=64
    python eval/peers.py --arms=ngram@4,early_exit:1@3,model:draft@4

Without arguments it takes the newest run, and prompts from its text; of files
`specjax.prompts` says how they may look.

Every one decodes the same prompts with the same weights, in float32 on the same
CPUs, one prompt at a time and in turns, plainly and in each way to draft that
it has, with drafts of one length. In all of them `ngram` is prompt lookup (here
it takes the latest match, there the first); in transformers `model:DRAFT` is
`assistant_model` and `early_exit:N` is `assistant_early_exit`. The prompt's own
pass is in all times, and nothing ends a text early. At T = 0 all should write
one text, up to near-ties; at T = 1 each draws its own. The temperatures are
those of `config.speedup`.

Writes `peers.json` and `peers.png` into the run, and into its folder `peers/`
the weights as the others read them. Who is not installed is left out.
"""

import functools
import importlib.util
import os
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
REPEATS = flags.DEFINE_integer('repeats', 3, 'timings of each, in turns')
THREADS = flags.DEFINE_integer(
  'threads', None, 'and CPUs, of everyone (default: all)'
)

OURS, PLAIN = 'specjax', 'plain'
NEAR_TIE = 1e-3  # of logits: others sum in another order, layer after layer
INSTALL = "pip install '.[peers]'"
NEEDS = {
  'transformers': ('torch', 'transformers', 'safetensors'),
  'llama.cpp': ('llama_cpp', 'gguf'),
}


class Arm(NamedTuple):
  """Who decodes, and how."""

  peer: str
  way: str


class Text(NamedTuple):
  """What one arm wrote behind one prompt.

  Attributes:
    tokens: the new ones.
    passes: of the target that gave them.
  """

  tokens: list[int]
  passes: int


def main(config, folder):
  """Exports, measures, writes, prints."""
  config = config.to_dict()
  if TOKENS.value is not None:
    config['decode']['max_new_tokens'] = TOKENS.value
  sizes = {
    '--count': COUNT.value,
    '--repeats': REPEATS.value,
    '--tokens': config['decode']['max_new_tokens'],
  }
  if min(sizes.values()) < 1:
    said = ', '.join(f'{name} is {value}' for name, value in sizes.items())
    raise ValueError(f'{said}: at least 1')
  if config['target']['dtype'] != 'float32':
    raise ValueError(
      f'target.dtype is {config["target"]["dtype"]!r}, and what is compared'
      ' here is float32'
    )
  threads = take_threads(THREADS.value)
  workspace = Workspace.look_at(folder, config)
  ways = [contest.parse(text, config['decode']['k']) for text in ARMS.value]
  prompts = read_prompts(workspace, PROMPTS.value, COUNT.value)
  peers, left_out = find(workspace, ways, prompts, threads)
  drafts = {}
  if 'transformers' in peers:
    drafts = {way: export(workspace, way) for way in ways}
  rows = []
  for t in config['speedup']['temperatures']:
    arms = enter(workspace, [None, *ways], peers, drafts, t)
    rows += measure(workspace, arms, prompts, t)
  report = {
    'device': runs.device(),
    'threads': threads,
    'versions': runs.versions() | versions(peers),
    'file': PROMPTS.value,
    'prompts': len(prompts),
    'prompt_tokens': float(np.mean([*map(len, prompts)])),
    'tokens': config['decode']['max_new_tokens'],
    'repeats': REPEATS.value,
    'left_out': left_out,
    'rows': rows,
    'config': config,
  }
  runs.write_json(folder / 'peers.json', runs.portable(report))
  picture = plots.peers(folder / 'peers.png', rows)
  show(report)
  print('picture:', picture)
  print('numbers:', folder / 'peers.json')


def read_prompts(workspace, path, count):
  """Token ids of what is decoded behind."""
  if not path:
    if workspace.corpus.name == corpora.NONE:
      raise ValueError(
        f'{workspace.folder} has no text to take prompts from: name a file with'
        ' --prompts'
      )
    length = workspace.config['decode']['prompt_length']
    return workspace.prompts('test', count, length)
  tasks = prompt_files.by_task(prompt_files.load(path), count)
  return [
    prompt_files.encode(text, workspace.tokenizer)
    for texts in tasks.values()
    for text in texts
  ]


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


def find(workspace, ways, prompts, threads):
  """Loads those who are installed.

  Returns:
    Decoders by name, and by the names of the others why they are left out.
  """
  longest = max(len(prompt) for prompt in prompts)
  size = longest + workspace.config['decode']['max_new_tokens']
  size += max((way.k or 0 for way in ways), default=0) + 1
  peers, left_out = {}, {}
  for name, packages in NEEDS.items():
    missing = [p for p in packages if not importlib.util.find_spec(p)]
    if missing:
      left_out[name] = f'{", ".join(missing)} not installed: {INSTALL}'
    else:
      try:
        peers[name] = load(name, workspace, threads, size)
      except ValueError as error:  # not everything can be exported
        left_out[name] = str(error)
  for name, why in left_out.items():
    print(f'{name} is left out: {why}')
  return peers, left_out


def load(name, workspace, threads, size):
  """Exports the target for a peer, and opens it there."""
  folder, target = workspace.folder / 'peers', workspace.target()
  if name == 'transformers':
    from peers import transformers_decode

    huggingface.save(target, folder / 'target', workspace.tokenizer)
    return transformers_decode.Decoder(folder / 'target', threads)
  from peers import llama_cpp_decode

  gguf.save(target, folder / 'target.gguf')
  return llama_cpp_decode.Decoder(folder / 'target.gguf', threads, size)


def export(workspace, way):
  """The folder of a way's draft model, written anew; None if it has none."""
  if way.kind != 'model':
    return None
  drafter = workspace.drafter(way.draft)
  if not hasattr(drafter, 'model'):
    return None
  folder = workspace.folder / 'peers' / way.draft
  huggingface.save(drafter.model, folder, workspace.tokenizer)
  return folder


def versions(peers):
  """Those of the peers."""
  found = {}
  for decoder in peers.values():
    found |= decoder.versions()
  return found


def enter(workspace, ways, peers, drafts, temperature):
  """What decodes in each arm: functions of a prompt and a seed.

  Args:
    workspace: the run.
    ways: to draft; None is plain decoding.
    peers: decoders by name.
    drafts: folders of exported draft models, by way.
    temperature: of target and drafts.
  """
  count = workspace.config['decode']['max_new_tokens']
  warp = warps.temperature(temperature)
  target, arms = workspace.target(), {}
  rule = verify.as_pytree(verify.rejection)
  ends = generation.end_ids(target, ())  # nothing ends a text early

  def ours(drafter, prompt, seed):
    state = generation.start(
      target,
      drafter,
      [prompt],
      key=jax.random.key(seed),
      max_new_tokens=count,
      room=benchmark.room(len(prompt) + count),
    )
    state = generation.advance(
      target, drafter, rule, warp, ends, state, decode.FOREVER
    )
    result = generation.finish(state, [len(prompt)])
    return Text(result.new_tokens()[0], int(result.stats.rounds[0]))

  def theirs(decoder, options, prompt, seed):
    return Text(*decoder.decode(prompt, count, temperature, seed, **options))

  for way in ways:
    drafter = way.drafter(workspace, temperature) if way else NoDrafter()
    drafter = pricing.with_warp(drafter, warp)
    label = way.name if way else PLAIN
    arms[Arm(OURS, label)] = functools.partial(ours, drafter)
    for name, decoder in peers.items():
      options = decoder.options(way, drafts.get(way))
      if options is not None:
        arms[Arm(name, label)] = functools.partial(theirs, decoder, options)
  return arms


def measure(workspace, arms, prompts, temperature):
  """The rows of a temperature."""
  calls = {
    arm: [functools.partial(f, prompt, i) for i, prompt in enumerate(prompts)]
    for arm, f in arms.items()
  }
  count = workspace.config['decode']['max_new_tokens']
  rooms = {
    benchmark.room(len(prompt) + count): i for i, prompt in enumerate(prompts)
  }
  title = f'T = {temperature:g}'
  with logs.Progress(len(calls), f'{title}: begin', unit='arms') as progress:
    for arm in calls.values():
      for i in rooms.values():
        arm[i]()
      progress.advance()
  total = REPEATS.value * len(prompts)
  with logs.Progress(total, f'{title}: decode', unit='turns') as progress:
    seconds, texts = timing.alternate(calls, REPEATS.value, progress.advance)
  rows = []
  for arm, taken in seconds.items():
    own = texts[arm]
    tokens = sum(len(text.tokens) for text in own)
    row: dict[str, Any] = {
      **arm._asdict(),
      'temperature': temperature,
      'tokens_per_second': tokens / float(np.median(taken)),
      'tokens_per_pass': tokens / sum(text.passes for text in own),
      'seconds': taken,
    }
    for key, peer in (('speedup', OURS), ('own_speedup', arm.peer)):
      spread = timing.ratio(seconds[Arm(peer, PLAIN)], taken)
      row |= {
        key: spread.median,
        f'{key}_min': spread.min,
        f'{key}_max': spread.max,
      }
    row['mismatches'] = None
    if temperature == 0:
      plain = texts[Arm(OURS, PLAIN)]
      row['mismatches'] = mismatches(workspace.target(), prompts, plain, own)
    rows.append(row)
  return rows


def mismatches(target, prompts, plain, own):
  """Where greedy text leaves ours; positions are of new tokens, from 0."""
  found = []
  for number, (prompt, *pair) in enumerate(
    zip(prompts, plain, own, strict=True)
  ):
    results = [
      generation.Result(
        np.array([[*prompt, *text.tokens]], np.int32),
        np.array([len(prompt) + len(text.tokens)]),
        np.array([len(prompt)]),
        None,
      )
      for text in pair
    ]
    for row in sweep.mismatches(target, [results[0]], [results[1]]):
      position = row['position'] - len(prompt)
      found.append({**row, 'prompt': number, 'position': position})
  return found


def show(report):
  """Prints a table for each temperature."""
  console = rich.console.Console(highlight=False)
  console.width = max(console.width, 120)  # of the widest table
  for t in dict.fromkeys(row['temperature'] for row in report['rows']):
    rows = [row for row in report['rows'] if row['temperature'] == t]
    console.print(
      f'\nT = {t:g}, batch 1: {report["prompts"]} prompts of'
      f' {report["prompt_tokens"]:.0f} tokens, {report["tokens"]} new ones'
      f' each, threads: {report["threads"]}'
    )
    table = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column('', no_wrap=True)
    table.add_column('way', no_wrap=True)
    for column in (
      'tokens/s',
      'tokens/pass',
      'over its own plain',
      'over plain specjax',
      *(['greedy text'] if t == 0 else []),
    ):
      table.add_column(column, justify='right', no_wrap=True)
    best = max(row['speedup'] for row in rows)
    for row in rows:
      table.add_row(
        row['peer'],
        row['way'],
        f'{row["tokens_per_second"]:,.1f}',
        f'{row["tokens_per_pass"]:.2f}',
        spread(row, 'own_speedup'),
        spread(row, 'speedup'),
        *([identity(row, report['prompts'])] if t == 0 else []),
        style='bold' if row['speedup'] == best else None,
      )
    console.print(table)
  console.print(
    'medians of repeats in turns [min–max], the pass of the prompt included;'
    " tokens/pass: of the target's passes that give tokens; greedy text: beside"
    ' that of plain specjax, the first new token that differs, and the gap of'
    ' the top two logits there'.replace('[', r'\[')
  )
  for name, why in report['left_out'].items():
    console.print(f'{name} is left out: {why}'.replace('[', r'\['))


def spread(row, key):
  """A ratio and its range."""
  low, high = row[f'{key}_min'], row[f'{key}_max']
  return rf'{row[key]:.2f}x \[{low:.2f}–{high:.2f}]'


def identity(row, prompts):
  """Whether greedy text is ours."""
  if not row['mismatches']:
    return 'same'
  worst = max(row['mismatches'], key=lambda found: found['margin'])
  near = worst['margin'] <= NEAR_TIE
  same = prompts - len(row['mismatches'])
  return (
    f'{same} of {prompts} same; {"tie" if near else "NO"} at'
    f' {worst["position"]}, {worst["margin"]:.1g}'
  )


if __name__ == '__main__':
  experiment.app(main)
