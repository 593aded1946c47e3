"""Compares ways to draft, under every rule that verifies them, on one run.

    python eval/drafters.py
    python eval/drafters.py --config configs/drafters.py
    python eval/drafters.py --arms=ngram@4,model:draft@4,distinct:draft@2x1

Without arguments it takes the newest run. `--arms`, or `config.drafters.arms`,
are ways to draft, written `kind:draft@size`; see `specjax.contest.parse`. All
decode the same prompts with the same keys, in turns with plain decoding. Then
each is certified, at the temperature of `config.decode`. For each of
`config.drafters.betas` the same is done for contrastive decoding, against plain
decoding of the same contrastive law. Writes `drafters.json` and `drafters.png`
into the run. The exit code is 1 if an arm that should be lossless is not.
"""

import itertools
import sys
import time
from typing import NamedTuple

import jax
from absl import flags

from specjax import (
  certify,
  contest,
  experiment,
  logs,
  plots,
  pricing,
  printing,
  proposers,
  runs,
  sweep,
  timing,
  verify,
  warps,
)
from specjax.certify import tiers
from specjax.contest import Arm
from specjax.models.contrastive import Contrastive
from specjax.types import Drafter, LanguageModel, Verifier
from specjax.workspace import Workspace

ARMS = flags.DEFINE_list(
  'arms', None, 'kind:draft@size, .. (default: config.drafters.arms)'
)
RULES = flags.DEFINE_list(
  'rules', None, 'that verify them (default: config.drafters.rules)'
)
NUM_TOKENS = flags.DEFINE_integer(
  'num_tokens', 3000, 'to certify each arm on; 0 certifies none'
)
TABLES = flags.DEFINE_integer(
  'tables', 5, 'random ones that a rule is enumerated on, in each shape'
)

FEWEST = 1000  # tokens, so that 64 cells are filled at every lag
JOINTLY = 'traversal', 'block'  # on a chain they are one
PROMPTS, EACH = 8, 4  # of a certificate: a batch is 4 rows of each of 8 prompts


def main(config, folder):
  """Measures, writes, prints."""
  config = config.to_dict()
  for flag, key in ((ARMS, 'arms'), (RULES, 'rules')):
    if flag.value is not None:
      config['drafters'][key] = tuple(flag.value)
  if NUM_TOKENS.value and NUM_TOKENS.value < FEWEST or TABLES.value < 1:
    raise ValueError(
      f'--num_tokens is {NUM_TOKENS.value} and --tables {TABLES.value}: at'
      f' least {FEWEST}, or 0, and 1'
    )
  start = time.perf_counter()
  entry = prepare(Workspace.look_at(folder, config))
  report = measure(entry)
  # Certificates take longest: what was measured is kept should they not end.
  runs.write_json(folder / 'drafters.json', runs.portable(report))
  if NUM_TOKENS.value:
    report['certificates'] = certificates(entry)
  report['seconds'] = time.perf_counter() - start
  runs.write_json(folder / 'drafters.json', runs.portable(report))
  picture = plots.contest(folder / 'drafters.png', report['rows'])
  show(report)
  print('picture:', picture)
  print('numbers:', folder / 'drafters.json')
  return 1 if failures(report) else 0


class Entry(NamedTuple):
  """What takes part.

  Attributes:
    workspace: the run.
    targets: by β; None is the run's target itself.
    ways: of drafting, by name, that the target is decoded with.
    contrastive: those that contrastive targets are.
    drafters: of all of them, by temperature and name.
    rules: by name.
    arms: which ways and rules go together.
    left_out: those that do not: `drafter`, `rule` and `why`.
  """

  workspace: Workspace
  targets: dict[float | None, LanguageModel]
  ways: dict[str, contest.Way]
  contrastive: dict[str, contest.Way]
  drafters: dict[float, dict[str, Drafter]]
  rules: dict[str, Verifier]
  arms: list[Arm]
  left_out: list[dict[str, str]]


def prepare(workspace):
  """Loads what takes part, and refuses what cannot, before any work.

  Raises:
    FileNotFoundError: drafts are missing.
    ValueError: an arm is none, or not made for its draft, or for no rule.
  """
  c, k = workspace.config['drafters'], workspace.config['decode']['k']
  texts = {'arms': c['arms'], 'contrastive': c['contrastive_arms']}
  if not c['betas']:
    texts['contrastive'] = ()
  ways, contrastive = (
    {way.name: way for way in (contest.parse(text, k) for text in part)}
    for part in texts.values()
  )
  rules = {name: verify.find(name) for name in c['rules']}
  all_ways = ways | contrastive
  require(workspace, [c['amateur']] if c['betas'] else [], all_ways)
  certified = workspace.config['decode']['temperature']
  drafters = {t: {} for t in (certified, *c['temperatures'])}
  for t, (name, way) in itertools.product(drafters, all_ways.items()):
    try:
      drafters[t][name] = way.drafter(workspace, t)
    except ValueError as error:
      raise ValueError(f'{name}: {error}') from error
  target = workspace.target()
  targets = {None: target}
  if c['betas']:
    amateur = workspace.drafter(c['amateur'])
    if not hasattr(amateur, 'model'):
      raise ValueError(
        f'drafters.amateur is {c["amateur"]!r}, which is no draft model'
      )
    targets |= {
      beta: Contrastive(target, amateur.model, c['alpha'], beta)
      for beta in c['betas']
    }
  own = {name: drafters[certified][name] for name in ways}
  arms, left_out = contest.pair(target, own, rules)
  for beta, law in targets.items():
    if beta is not None:
      own = {name: drafters[certified][name] for name in contrastive}
      contest.pair(law, own, {'rejection': verify.rejection})
      break  # the others differ in a number
  return Entry(
    workspace, targets, ways, contrastive, drafters, rules, arms, left_out
  )


def require(workspace, names, ways):
  """Refuses that drafts are missing, with the commands that train them."""
  for way in ways.values():
    names = [*names, *way.folders]
  missing = workspace.missing(list(dict.fromkeys(names)))
  if not missing:
    return
  pages = workspace.config['drafters'].get('pages', {})
  commands = [
    'python train/distill.py'
    + (f' --config {pages[name]}' if name in pages else '')
    + f' --workdir {workspace.folder} --draft={name}'
    for name in missing
  ]
  raise FileNotFoundError(
    f'{workspace.folder} has no {", ".join(missing)} yet: run'
    f' `{"` and `".join(commands)}`'
  )


def measure(entry):
  """The whole report."""
  config = entry.workspace.config
  c, length = config['drafters'], config['decode']['prompt_length']
  count = max(c['prompts'], *c['batches'])
  prompts = entry.workspace.prompts('test', count, length)
  rows, pairs = [], []
  plain, *betas = entry.targets
  for some, batch in itertools.product(([plain], betas), c['batches']):
    cases = list(itertools.product(some, c['temperatures'], [batch]))
    if cases:
      more = race(entry, prompts, cases)
      rows, pairs = rows + more[0], pairs + more[1]
    # A process may map so many compiled programs, and no more.
    jax.clear_caches()
  # As they are shown; of equals those measured first.
  rows.sort(
    key=lambda row: (list(entry.targets).index(row['beta']), row['temperature'])
  )
  return {
    'device': runs.device(),
    'versions': runs.versions(),
    'rows': rows,
    'pairs': pairs,
    'certificates': [],
    'left_out': entry.left_out,
    'lossy': [name for name in entry.rules if verify.is_lossy(name)],
    'config': config,
  }


def race(entry, prompts, cases):
  """The rows of some contests, and pairs of them; see `enter`, `compare`."""
  repeats = entry.workspace.config['drafters']['repeats']
  contests = enter(entry, prompts, cases)
  total = repeats * sum(found.parts for _, found in contests)
  rows, pairs = [], []
  with logs.Progress(total, 'decode', unit='turns') as progress:
    for beta, found in contests:
      timed = found.run(repeats, progress.advance)
      rows += [{'beta': beta, **row} for row in timed]
      if beta is None:
        pairs += compare(entry, found, timed)
  return rows, pairs


def enter(entry, prompts, cases):
  """Contests of cases (β, or None for the target itself, T, batch), compiled.

  Returns:
    Pairs of β and a contest.
  """
  config = entry.workspace.config
  c, new = config['drafters'], config['decode']['max_new_tokens']
  total = sum(
    1 + len(entry.ways if beta is None else entry.contrastive)
    for beta, _, _ in cases
  )
  contests = []
  with logs.Progress(total, 'prefill', unit='drafters') as progress:
    for beta, t, batch in cases:
      names, arms = entry.ways, entry.arms
      if beta is not None:
        names = entry.contrastive
        arms = [Arm(name, 'rejection') for name in names]
      found = contest.Contest(
        entry.targets[beta],
        {name: entry.drafters[t][name] for name in names},
        entry.rules,
        arms,
        groups=sweep.groups(prompts, batch, c['prompts']),
        max_new_tokens=new,
        temperature=t,
        done=progress.advance,
      )
      contests.append((beta, found))
  lowered = {}
  total = sum(found.programs for _, found in contests)
  with logs.Progress(total, 'trace', unit='programs') as progress:
    for _, found in contests:
      lowered |= found.lowered(lowered, progress.advance)
  with logs.Progress(len(lowered), 'compile', unit='programs') as progress:
    compiled = timing.compile_all(lowered, progress.advance)
  for _, found in contests:
    found.compiled(compiled)
  return contests


def compare(entry, found, rows):
  """Trees, mixtures and early exits beside chains of as many nodes."""
  by_arm = {Arm(row['drafter'], row['rule']): row for row in rows}
  pairs = []
  for one, other in itertools.permutations(by_arm, 2):
    ways = entry.ways[one.drafter], entry.ways[other.drafter]
    same = by_arm[one]['nodes'] == by_arm[other]['nodes']
    alike = one.rule == other.rule or (one.rule, other.rule) == JOINTLY
    if not (same and alike and contest.rivals(*ways)):
      continue
    tokens = [by_arm[arm]['tokens_per_round'] for arm in (one, other)]
    pairs.append(
      {
        'arm': one._asdict(),
        'against': other._asdict(),
        'temperature': found.temperature,
        'batch': found.batch,
        'nodes': by_arm[one]['nodes'],
        'tokens_per_round': tokens,
        'faster': found.against(one, other)._asdict(),
      }
    )
  return pairs


def certificates(entry):
  """What `certify` says of every arm: as a whole, one false alarm in 100."""
  config = entry.workspace.config
  c = config['decode']
  warp = warps.temperature(c['temperature'])
  prompts = entry.workspace.prompts('test', PROMPTS, c['prompt_length'])
  cases = [(None, arm) for arm in entry.arms]
  cases += [
    (beta, Arm(name, 'rejection'))
    for beta in entry.targets
    if beta is not None
    for name in entry.contrastive
  ]
  rules = {**entry.rules, 'rejection': verify.rejection}
  tables = {
    rule: tiers.on_tables(rule, rules[rule], TABLES.value)
    for rule in dict.fromkeys(arm.rule for _, arm in cases)
  }
  found, plain = [], {}
  for i, (beta, arm) in enumerate(cases):
    label = '' if beta is None else f', contrastive with β = {beta:g}'
    print(
      f'certificate {i + 1} of {len(cases)}: {arm.drafter}, {arm.rule}{label}',
      file=sys.stderr,
    )
    way = (entry.ways | entry.contrastive)[arm.drafter]
    drafter = entry.drafters[c['temperature']][arm.drafter]
    subject = tiers.Subject(
      entry.targets[beta],
      pricing.with_warp(drafter, warp),
      rules[arm.rule],
      warp,
      proposers.direction(entry.workspace, way.kind, way.draft, warp),
      jax.random.key(0),
    )
    depth = way.k or drafter.k
    new = max(c['max_new_tokens'], 2 * (depth + 1))  # for two rounds
    got = tiers.certify(
      subject,
      arm.rule,
      prompts,
      tokens=NUM_TOKENS.value,
      depth=depth,
      each=EACH,
      max_new_tokens=new,
      tables=tables[arm.rule],
      plain=plain.get((beta, new)),
      seeds=False,  # greedy text is compared where it is timed
      level=certify.LEVEL / len(cases),
    )
    plain[beta, new] = got.text[tiers.PLAIN]
    found.append({'beta': beta, **arm._asdict(), **got.summary()})
    jax.clear_caches()  # as above
  return found


def failures(report):
  """The arms that should be lossless and are not."""
  failed = [
    (row['beta'], row['drafter'], row['rule'])
    for row in report['certificates']
    if row['verdict'] == 'FAIL'
  ]
  if report['config']['target']['dtype'] == 'float32':
    failed += [
      (row['beta'], row['drafter'], row['rule'])
      for row in report['rows']
      if row['rule'] not in report['lossy'] and margin(row) > certify.NEAR_TIE
    ]
  return sorted(set(failed), key=str)


def margin(row):
  """The widest gap of logits at which greedy text left plain decoding."""
  return max((found['margin'] for found in row['mismatches'] or ()), default=0)


def show(report):
  """Prints a table for each target, temperature and batch."""
  console = printing.console(120)  # of the widest table
  verdicts = {
    (row['beta'], row['drafter'], row['rule']): row['verdict']
    for row in report['certificates']
  }

  def case(row):
    return row['beta'], row['temperature'], row['batch']

  for (beta, t, batch), rows in itertools.groupby(report['rows'], case):
    rows = list(rows)
    plain = rows[0]['baseline_tokens_per_second']
    law = '' if beta is None else f'contrastive, β = {beta:g}; '
    console.print(
      f'\n{law}T = {t:g}, batch {batch}: plain decoding {plain:,.0f} tokens/s'
    )
    numbers = 'nodes', 'α', 'tokens/round', 'draft', 'c', 'speedup [min–max]'
    numbers += ('greedy', 'certificate') if t == 0 else ('certificate',)
    table = printing.table('drafter', 'rule', numbers=numbers)
    best = max(row['speedup'] for row in rows)
    for row in rows:
      verdict = verdicts.get((beta, row['drafter'], row['rule']), '')
      lossy = row['rule'] in report['lossy']
      table.add_row(
        row['drafter'],
        row['rule'],
        f'{row["nodes"]}',
        '' if row['acceptance'] is None else f'{row["acceptance"]:.3f}',
        f'{row["tokens_per_round"]:.2f}',
        f'{row["draft_cost"]:.3f}',
        '' if row['tree'] else f'{row["draft_cost"] / row["nodes"]:.3f}',
        printing.gain(row),
        *([identity(row)] if t == 0 else []),
        'LOSSY' if lossy else verdict,
        style='bold' if row['speedup'] == best else None,
      )
    console.print(table)
  console.print(
    'nodes: scored of a row in a round; α: passed of tested tokens; draft: of a'
    ' round, in plain rounds; c: the same per token of a chain; greedy: text'
    ' against plain text, with the gap of the top two logits where it leaves'
  )
  show_pairs(console, report['pairs'])
  for row in report['left_out']:
    console.print(f'left out: {row["drafter"]}, {row["rule"]}: {row["why"]}')
  if report['certificates']:
    leak = max(row['detectable_leak'] for row in report['certificates'])
    console.print(
      f'certificates: {report["certificates"][0]["tokens"]:,} tokens of an arm'
      ' or more; all of them together raise a false alarm with probability'
      f' {certify.LEVEL:.0%}; a leak of mean TV {leak:.3f} per token is caught'
      f' in every arm with probability {certify.POWER:.0%} each'
    )
  for beta, drafter, rule in failures(report):
    law = '' if beta is None else f', β = {beta:g}'
    console.print(f'NOT LOSSLESS: {drafter}, {rule}{law}', style='bold red')


def show_pairs(console, pairs):
  """Prints what a tree, a mixture or an early exit is to chains."""
  if not pairs:
    return
  console.print('\nat as many scored nodes, tokens per round and time')
  numbers = 'nodes', 'T', 'batch', 'tokens/round', 'faster'
  table = printing.table('', 'rule', 'against', 'rule', numbers=numbers)
  for row in pairs:
    one, other, faster = row['arm'], row['against'], row['faster']
    table.add_row(
      one['drafter'],
      one['rule'],
      other['drafter'],
      other['rule'],
      f'{row["nodes"]}',
      f'{row["temperature"]:g}',
      f'{row["batch"]}',
      ' : '.join(f'{tokens:.2f}' for tokens in row['tokens_per_round']),
      printing.spread(faster['median'], faster['min'], faster['max']),
    )
  console.print(table)


def identity(row):
  """Whether greedy text is plain decoding's."""
  if not row['mismatches']:
    return 'same'
  near = margin(row) <= certify.NEAR_TIE
  return f'{"tie" if near else "NO"} {margin(row):.1g}'


if __name__ == '__main__':
  experiment.app(main)
