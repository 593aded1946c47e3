"""Measures how much faster a run's draft makes its target.

    python eval/speedup.py

Without arguments it takes the newest run. It writes `speedup.json` and pictures
into the run. The headline is the draft length that measured best at batch 1 and
the temperature of `config.decode`; the table has all others. What rounds cost
goes to `costs.json` in the run, and a second table says where the speedup that
is predicted from it, and from acceptance on other prompts, leaves the measured
one, and why.

    python eval/speedup.py --prompts=question.jsonl --arms=ngram,model:draft@4
    python eval/speedup.py --target=MODEL --prompts=question.jsonl

With prompts, of which `specjax.prompts` says how they may look, ways to draft
are measured task by task, behind each prompt by itself; `tasks.json` and
`tasks.png` go into the run. `--target` is a model that was trained elsewhere,
which becomes the target of a run of its own; see configs/pretrained.py.

    python eval/speedup.py --check=kept/speedup.json

With a report that an earlier call wrote, also one with --prompts, gains are
compared with those: the exit code says whether a way's best repeat is below its
worst one then, and its median by 5 % or more. They are ratios, so that a day on
which the machine is slow changes little.

    python eval/speedup.py --profile --arms=ngram,model:draft@4

says where the time of a round goes, part by part, plainly and in each way to
draft, at the smallest batch, and what moving its bytes from memory takes.
`profile.json` and traces of some rounds go into the run.
"""

import itertools
import sys
import time
from pathlib import Path

import baseline
import by_task
import round_parts
from absl import flags

from specjax import (
  certify,
  contest,
  corpora,
  draft_length,
  experiment,
  footprint,
  generation,
  logs,
  metrics,
  plots,
  pricing,
  printing,
  runs,
  sweep,
  timing,
  verify,
  warps,
  weights,
)
from specjax.checkpoint import Checkpoints
from specjax.workspace import Workspace

DRAFT = flags.DEFINE_string(
  'draft', 'draft', "the draft's folder in the run; untrained: a bad one"
)
PROMPTS = flags.DEFINE_string('prompts', None, 'file of prompts, by task')
ARMS = flags.DEFINE_list(
  'arms', ['ngram'], 'with --prompts or --profile: kind:draft@size, ..'
)
PROFILE = flags.DEFINE_bool(
  'profile', False, 'where the time of a round goes, and nothing else'
)
TOP_P = flags.DEFINE_float(
  'top_p', None, 'with --profile: of the warp, behind config.decode.temperature'
)
COUNT = flags.DEFINE_integer('count', 8, 'with --prompts: of each task')
CHECK = flags.DEFINE_string(
  'check', None, 'a report that was kept: fails where a gain is less than there'
)
TARGET = flags.DEFINE_string(
  'target', None, 'a model: a folder, .gguf or name on the hub'
)

OUTPUT = 'speedup.json'


def main(config, folder):
  """Measures, writes, prints."""
  config = config.to_dict()
  refuse_idle_flags()
  # All that may be wrong is read before a model is.
  by_arms = PROMPTS.value or PROFILE.value
  ways = by_task.parse(ARMS.value, config['decode']['k']) if by_arms else ()
  about, output, rows = {'draft': DRAFT.value}, folder / OUTPUT, 'sweep'
  if PROMPTS.value:
    texts = by_task.read(PROMPTS.value, COUNT.value)
    about = {'file': PROMPTS.value, 'count': COUNT.value}
    output, rows = folder / by_task.OUTPUT, by_task.ROWS
  before = baseline.read(CHECK.value, output, rows) if CHECK.value else None
  if before:
    wanted = to_measure(config, ways)
    baseline.require_covered(before[rows], wanted, CHECK.value)
  contest.require(Workspace(folder, config), ways)
  if TARGET.value and Checkpoints(folder / 'target').latest() is None:
    Workspace.create(folder, config).adopt_target()
  workspace = Workspace.look_at(folder, config)
  if PROFILE.value:
    round_parts.measure(workspace, ways, TOP_P.value or 1.0)
    return 0
  about |= {'device': runs.device()}
  if before:
    now = {**about, 'config': workspace.config}
    baseline.require_same(before, now, CHECK.value)
  if PROMPTS.value:
    report, lost = by_task.measure(workspace, texts, ways, about)
  else:
    report = about | measure(workspace, DRAFT.value)
    runs.write_json(output, runs.portable(report))
    pictures = draw(workspace, DRAFT.value, report)
    show(report)
    print('pictures:', *pictures)
    print('numbers:', output)
    lost = not report['lossy'] and is_lost(report)
  slower = before and baseline.compare(before[rows], report[rows])
  return 1 if lost or slower else 0


def to_measure(config, ways):
  """What rows will be of, by the name of each part of their key."""
  c = config['speedup']
  if PROMPTS.value:
    drafters = [way.name for way in ways]
    return {'temperature': c['temperatures'], 'drafter': drafters}
  longest = min(c['controlled_k'], max(c['ks']))  # of controllers
  return {
    'temperature': c['temperatures'],
    'batch': c['batches'],
    'drafter': ['model', 'ngram', *c['controllers']],
    'k': {*c['ks'], config['decode']['k'], longest},
  }


def refuse_idle_flags():
  """Refuses flags that would make no difference, or no sense.

  Raises:
    ValueError: naming them.
  """
  by_arms = PROMPTS.value or PROFILE.value
  if TARGET.value and not by_arms:
    raise ValueError(
      '--target has no draft to measure but with --prompts or --profile'
    )
  if by_arms and flags.FLAGS['draft'].present:
    raise ValueError(
      f'--draft={DRAFT.value} has no part beside --prompts or --profile: name'
      f' it among the ways, as in --arms=model:{DRAFT.value}@4'
    )
  for flag, used in (('arms', by_arms), ('count', PROMPTS.value)):
    if flags.FLAGS[flag].present and not used:
      raise ValueError(
        f'--{flag} has no part here: it says what is measured with --prompts'
      )
  if PROFILE.value and (PROMPTS.value or CHECK.value):
    raise ValueError('--profile has neither --prompts nor --check')
  if TOP_P.value is not None:
    if not PROFILE.value:
      raise ValueError(f'--top_p={TOP_P.value:g} is for --profile')
    if not 0 < TOP_P.value <= 1:
      raise ValueError(f'--top_p is {TOP_P.value:g}: above 0, and 1 at most')


def measure(workspace: Workspace, draft: str):
  """The whole report."""
  config = workspace.config
  c, decode = config['speedup'], config['decode']
  name, new = config['draft']['drafter'], decode['max_new_tokens']
  rule = verify.find(decode['verify'])
  largest = max(c['batches'])
  size = decode['prompt_length'] + new
  drafter = workspace.drafter(draft).at(max(c['ks']))
  target = workspace.target()
  print(f'batch {largest}: {footprint.plan(target, drafter, largest, size)}')
  count = max(c['prompts'], largest)
  wanted = max(c['others'], largest)
  controllers = c['controllers']
  # What a round costs is measured at the fixed lengths.
  controlled_k = min(c['controlled_k'], max(c['ks']))
  # Of one split, so that they differ by nothing but chance.
  prompts = workspace.prompts('test', count + wanted, decode['prompt_length'])
  timed, others = prompts[:count], prompts[count:]
  others = sweep.groups(others, largest, wanted)

  costs_file = workspace.folder / 'costs.json'
  pricing.check(costs_file)
  start = time.perf_counter()
  # Of large batches, where packed ones are slower, the models as they are.
  whole, packed = (target, drafter), generation.pack(target, drafter)
  models = {
    batch: packed
    if weights.worth_packing(generation.scored_rows(target, drafter, batch))
    else whole
    for batch in c['batches']
  }
  races = {
    batch: sweep.Race(
      *models[batch],
      name=name,
      ks=c['ks'],
      ngram_k=decode['k'],
      rule=rule,
      groups=sweep.groups(timed, batch, c['prompts']),
      others=others if batch == largest else [],
      max_new_tokens=new,
      controllers=controllers,
      controlled_k=controlled_k,
    )
    for batch in c['batches']
  }
  lowered = {}
  for race in races.values():
    lowered |= race.lowered()
  with logs.Progress(len(lowered), 'compile', unit='programs') as progress:
    compiling = {}
    compiled = timing.compile_all(lowered, progress.advance, seconds=compiling)
  for race in races.values():
    race.compiled(compiled)
  compile_seconds = time.perf_counter() - start

  total = c['repeats'] * sum(race.parts for race in races.values())
  total *= len(c['temperatures'])
  rows, mismatches, expected = [], [], {}
  with logs.Progress(total, 'decode', unit='turns') as progress:
    for t in c['temperatures']:
      expected[t] = races[largest].outlook(t)
      for race in races.values():
        rows += race.run(t, c['repeats'], progress.advance)
        if t == 0:
          mismatches += race.greedy_mismatches(race.results[t])

  costs = {batch: race.costs() for batch, race in races.items()}
  for row in rows:
    outlook = expected[row['temperature']]
    if sweep.Arm(row['drafter'], row['k']) in outlook.rounds:
      cost = costs[row['batch']][row['drafter']]
      parts = races[row['batch']].parts
      row |= sweep.predict(row, outlook, cost, parts, new)
    elif row['drafter'] in controllers:
      # A draft that stops itself has no length that tells what it took.
      cost = costs[row['batch']][name]
      known = row['drafter'] != 'confidence'
      row['modelled_speedup'] = (
        sweep.modelled_speedup(row, cost) if known else None
      )
  keep(costs_file, models, config, costs)
  best = headline(rows, name, min(c['batches']), decode['temperature'])
  text = held_out(workspace, largest, size)
  return {
    'versions': runs.versions(),
    'verify': decode['verify'],
    'lossy': verify.is_lossy(decode['verify']),
    **best,
    'greedy_identical': not mismatches if 0 in c['temperatures'] else None,
    'greedy_mismatches': mismatches,
    'corpus_repetition': metrics.repetition(
      row[decode['prompt_length'] :] for row in text
    ),
    'compile_seconds': compile_seconds,
    'ladder': ladder(c, controlled_k, compiling),
    'costs': {
      batch: {drafter: cost._asdict() for drafter, cost in found.items()}
      for batch, found in costs.items()
    },
    'other_prompts': len(others) * largest,
    'alpha': {t: outlook.alpha for t, outlook in expected.items()},
    'sweep': rows,
    'config': config,
  }


def held_out(workspace: Workspace, count: int, length: int):
  """Held-out text, nothing where there is no text at all."""
  if workspace.corpus.name == corpora.NONE:
    return []
  return workspace.prompts('validation', count, length)


def ladder(c, k, seconds):
  """What it took to compile ladders of lengths, and a fixed one, by name."""
  wanted, found = {*c['controllers']}, {}
  for (batch, (kind, arm)), took in seconds.items():
    fixed = arm.k == max(c['ks']) and arm.name != 'ngram'
    if kind == 'round' and batch == min(c['batches']):
      if fixed or arm.name in wanted:
        found[arm.name] = took
  return {'rungs': draft_length.ladder(k), 'seconds': found}


def keep(path, models, config, costs):
  """Writes what rounds of the draft cost for those who want it later."""
  decode = config['decode']
  for batch, found in costs.items():
    place = pricing.key(
      *models[batch],
      verify.find(decode['verify']),
      warps.UNCHANGED,
      batch,
      decode['prompt_length'] + decode['max_new_tokens'],
    )
    pricing.save(path, place, found[config['draft']['drafter']])


def headline(rows, name, batch, temperature):
  """The best row of the draft at one batch size and temperature."""
  found = sorted(
    (row for row in rows if row['drafter'] == name and row['batch'] == batch),
    key=lambda row: (abs(row['temperature'] - temperature), -row['speedup']),
  )
  return found[0]


def draw(workspace, draft, report):
  """Writes the pictures; returns their paths."""
  folder = workspace.folder
  rows = report['sweep']
  widest = {}
  for row in rows:  # the longest draft of the largest batch comes last
    label = f'{row["drafter"]}, T = {row["temperature"]:g}'
    widest[label] = row['acceptance_by_depth']
  pictures = [
    plots.speedup_by_k(folder / 'speedup.png', rows),
    plots.acceptance_by_depth(folder / 'acceptance_by_depth.png', widest),
    plots.predictions(folder / 'predictions.png', own(report)),
  ]
  for log, panels in (
    (
      'pretrain',
      {'nats per token': ('loss', 'nats'), 'bits per byte': ('bits_per_byte',)},
    ),
    (
      draft,
      {
        'loss': ('loss',),
        'acceptance rate α': ('acceptance',),
        'tokens per round': ('block_efficiency',),
      },
    ),
  ):
    records = logs.read(folder / 'logs' / f'{log}.jsonl')
    if records:
      path = folder / f'training_{log}.png'
      pictures.append(
        plots.training_curves(path, records, panels, f'Training: {log}')
      )
  return pictures


def show(report):
  """Prints a table for each temperature and batch, and what they come to."""
  console = printing.console(96)  # of the second table
  for (t, batch), rows in itertools.groupby(
    report['sweep'], lambda row: (row['temperature'], row['batch'])
  ):
    rows = list(rows)
    plain = rows[0]['baseline_tokens_per_second']
    console.print(
      f'\nT = {t:g}, batch {batch}: plain decoding {plain:,.0f} tokens/s;'
      f' {percent(rows[0]["repetition"])} of the 4-grams are repeated'
    )
    numbers = 'drafter', 'K', 'tokens/round', 'accepted', 'tokens/s'
    table = printing.table(numbers=(*numbers, 'speedup [min–max]'))
    controlled = [row for row in rows if 'modelled_speedup' in row]
    if controlled:
      printing.add(table, 'modelled')
    for row in rows:
      rate, modelled = row['acceptance_rate'], row.get('modelled_speedup')
      best = all(
        report[key] == row[key]
        for key in ('drafter', 'k', 'batch', 'temperature')
      )
      table.add_row(
        row['drafter'],
        f'≤ {row["k"]}' if row in controlled else f'{row["k"]}',
        f'{row["tokens_per_round"]:.2f}',
        '' if rate is None else f'{rate:.1%}',
        f'{row["tokens_per_second"]:,.0f}',
        printing.gain(row),
        *([f'{modelled:.2f}x' if modelled else ''] if controlled else []),
        style='bold' if best else None,
      )
    console.print(table)
    for row in controlled:
      total = sum(row['lengths'])
      used = ', '.join(
        f'{k}: {count / total:.0%}'
        for k, count in enumerate(row['lengths'])
        if count
      )
      console.print(f'{row["drafter"]} scored drafts of {used}')
    explain(console, [row for row in own(report) if row in rows])
  print(
    f'{report["speedup"]:.2f}x at K = {report["k"]}, T ='
    f' {report["temperature"]:g}, batch {report["batch"]}: '
    f'{report["tokens_per_second"]:,.0f} tokens/s against'
    f' {report["baseline_tokens_per_second"]:,.0f};'
    f' {report["predicted_speedup"]:.2f}x was predicted from'
    f' {report["expected_tokens_per_pass"]:.2f} tokens per round on'
    f' {report["other_prompts"]} other prompts, drafting at'
    f' {report["draft_cost_ratio"]:.3f} plain rounds a token and'
    f' {report["verify_cost"]:.2f} for the rest of a round'
  )
  print(
    f'repeated 4-grams: {percent(report["repetition"])} of the output,'
    f' {percent(report["corpus_repetition"])} of held-out text'
  )
  rungs, seconds = report['ladder'].values()
  if len(seconds) > 1:
    each = (f'{name} {took:.1f} s' for name, took in seconds.items())
    print(
      f'compiled, two at a time: {", ".join(each)}: every rung after the first'
      f' of {", ".join(map(str, rungs))} adds {ladder_rung(report):.1f} s'
    )
  if report['lossy']:
    print(f'LOSSY: {report["verify"]} does not keep the law of the target')
  print(greedy(report))


def own(report):
  """The rows of the draft at a fixed length, which are predicted."""
  name = report['config']['draft']['drafter']
  return [
    row
    for row in report['sweep']
    if row['drafter'] == name and 'predicted_speedup' in row
  ]


def explain(console, rows):
  """Prints where prediction and measurement part, and what a round is made of.

  Args:
    console: to print to.
    rows: of the draft at one temperature and batch size.
  """
  numbers = 'K', 'predicted [95 %]', 'in all', 'tokens', 'time', 'i.i.d.', 'v=1'
  table = printing.table(
    numbers=(*numbers, 'round', 'host', 'draft', 'verify', 'loop'),
    title='predicted; too high by, in all = tokens × time; ms of a round',
  )
  for row in rows:
    parts = row['round_parts']
    table.add_row(
      f'{row["k"]}',
      printing.spread(
        *(row[f'predicted_{key}'] for key in ('speedup', 'min', 'max')), unit=''
      ),
      *(f'{row[off]:+.0%}' for off in ('off', 'off_by_tokens', 'off_by_time')),
      *(f'{row[by]:.2f}' for by in ('iid_speedup', 'classical_speedup')),
      f'{1e3 * row["round_seconds"]:.1f}',
      *(f'{1e3 * parts[name]:.1f}' for name in plots.PARTS),
    )
  console.print(table)
  best = sweep.best_ks(rows)
  console.print(
    f'best K: {best["speedup"]} measured, {best["predicted_speedup"]}'
    f' predicted, {best["iid_speedup"]} i.i.d., {best["classical_speedup"]}'
    ' with v = 1'
  )


def ladder_rung(report) -> float:
  """Seconds that each rung adds to what a fixed length takes to compile."""
  ladder = report['ladder']
  seconds = dict(ladder['seconds'])
  fixed = seconds.pop(report['config']['draft']['drafter'])
  mean = sum(seconds.values()) / len(seconds)
  return (mean - fixed) / (len(ladder['rungs']) - 1)


def greedy(report) -> str:
  """What T = 0 showed about losslessness."""
  if report['greedy_identical'] is None:
    return 'greedy text was not compared: T = 0 is not in config.speedup'
  if report['greedy_identical']:
    return 'greedy text is identical to plain decoding, in every arm'
  margin = widest_margin(report)
  return (
    f'greedy text leaves plain decoding in {len(report["greedy_mismatches"])}'
    f' rows; the two highest logits there differ by at most {margin:.2g}'
    + (': NOT LOSSLESS' if is_lost(report) else ', a near-tie')
  )


def is_lost(report) -> bool:
  """Whether greedy text differs by more than float32 rounds.

  In bfloat16 near-ties are common, and wider: there it shows nothing.
  """
  exact = report['config']['target']['dtype'] == 'float32'
  return exact and widest_margin(report) > certify.NEAR_TIE


def widest_margin(report) -> float:
  """The widest gap of logits at which greedy text left plain decoding."""
  return max(
    (found['margin'] for found in report['greedy_mismatches']), default=0.0
  )


def percent(share) -> str:
  """A share that may be unknown, as of a text that is too short."""
  return 'unknown' if share is None else f'{share:.1%}'


def with_target(argv):
  """The arguments, `--target=MODEL` written in full.

  The model is that of a run that is named like it.
  """
  joined = [
    f'{name}={value}' if name == '--target' else name
    for name, value in itertools.zip_longest(argv, argv[1:], fillvalue='')
  ]
  models = [a.partition('=')[2] for a in joined if a.startswith('--target=')]
  if not models:
    return argv
  page = Path(__file__).parents[1] / 'configs' / 'pretrained.py'
  name = Path(models[-1]).resolve().name
  name = name.removesuffix('.gguf').removesuffix('.bin')
  return [
    argv[0],
    f'--config={page}',
    f'--workdir=runs/{name}',
    f'--config.target.path={models[-1]}',
    *argv[1:],  # which may say otherwise
  ]


if __name__ == '__main__':
  sys.argv = with_target(sys.argv)
  experiment.app(main)
