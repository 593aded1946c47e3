"""Certifies that what a run's decoder writes has the law of its target.

    python eval/losslessness.py
    python eval/losslessness.py --drafter=ngram --verify=block

Without arguments it takes the newest run. Says PASS, with exit code 0, or FAIL,
with 1; a lossy rule is labelled so and never passes. `specjax.certify` explains
the tests. It writes `losslessness.json` and `losslessness.png` into the run.
"""

import dataclasses
import math
import time
from typing import NamedTuple

import jax
import numpy as np
import rich.box
import rich.console
import rich.table
from absl import flags
from flax import nnx

from specjax import (
  certify,
  experiment,
  logs,
  metrics,
  plots,
  runs,
  verify,
  warps,
)
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.models.transformer import Transformer
from specjax.types import Trainable, Warp
from specjax.workspace import Workspace

NUM_TOKENS = flags.DEFINE_integer(
  'num_tokens', 20_000, 'to test, of each arm; more see smaller faults'
)
SEQUENCES = flags.DEFINE_integer(
  'sequences', 10_000, 'short ones of each arm to display; 0 shows none'
)
DRAFTER = flags.DEFINE_enum(
  'drafter', 'model', ['model', 'ngram', 'none'], 'model: the distilled draft'
)
DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")
VERIFY = flags.DEFINE_string(
  'verify', 'rejection', 'a rule of specjax.verify, or module:function'
)
TEMPERATURE = flags.DEFINE_float(
  'temperature', None, '0 is greedy (default: config.decode)'
)
K = flags.DEFINE_integer('k', None, 'draft length (default: config.decode)')
SEED = flags.DEFINE_integer('seed', 0, 'another one, another text')

PLAIN = NoDrafter(), verify.rejection
ARMS = 'speculative', 'plain'
FEWEST = 1000  # tokens, so that 64 cells are filled at every lag
PROMPTS, EACH = 8, 4  # a batch is 4 rows of each of 8 prompts
SHOWN_PROMPTS, SHOWN_EACH = 4, 8
# Short: the tables compare the first tokens behind a prompt, and their laws
# are flatter where little is known.
SHOWN_LENGTH, SHOWN_TOKENS = 4, 4


def main(config, folder):
  """Samples, tests, writes, prints."""
  config = config.to_dict()
  for flag, key in ((TEMPERATURE, 'temperature'), (K, 'k')):
    if flag.value is not None:
      config['decode'][key] = flag.value
  check(config['decode'])
  rule = verify.find(VERIFY.value)
  workspace = Workspace.look_at(folder, config)
  report, curves = examine(workspace, rule)
  runs.write_json(folder / 'losslessness.json', runs.portable(report))
  path = plots.losslessness(
    folder / 'losslessness.png',
    curves,
    report['tests'],
    report['display'] or (),
    f'Losslessness of {report["rule"]}: {report["verdict"]}',
  )
  show(report)
  print('picture:', path)
  print('numbers:', folder / 'losslessness.json')
  return 0 if report['verdict'] == 'PASS' else 1


def check(decode):
  """Refuses what cannot be measured, before any work."""
  warps.temperature(decode['temperature'])
  if decode['k'] < 0:
    raise ValueError(f'the draft length is {decode["k"]}: at least 0')
  if NUM_TOKENS.value < FEWEST:
    raise ValueError(
      f'--num_tokens is {NUM_TOKENS.value}: the tests need at least {FEWEST}'
    )
  if SEQUENCES.value < 0:
    raise ValueError(f'--sequences is {SEQUENCES.value}: 0 or more')


def examine(workspace, rule):
  """The report, and the distribution functions to draw."""
  start = time.perf_counter()
  c = workspace.config['decode']
  warp = warps.temperature(c['temperature'])
  target = workspace.target()
  drafter, direction = build(workspace, warp)
  arms = {'speculative': (drafter, rule), 'plain': PLAIN}
  model = Model(target, warp, direction)

  prompts = workspace.prompts('test', PROMPTS, c['prompt_length'])
  # Room for two rounds, so that there are pairs K + 1 apart in every row.
  new = max(c['max_new_tokens'], 2 * (c['k'] + 1))
  batches = -(-NUM_TOKENS.value // (PROMPTS * EACH * new))
  settings = {'each': EACH, 'batches': batches, 'max_new_tokens': new}
  seen, results = {}, {}
  with logs.Progress(4 * batches, 'test', unit='batches') as bar:
    for i, (arm, parts) in enumerate(arms.items()):
      results[arm] = model.sample(*parts, prompts, i, settings, bar.advance)
      seen[arm] = model.observe(results[arm], bar.advance)
  tests = certify.decide(seen, lags=c['k'] + 1)

  bits = check_bits(model, drafter, rule, prompts, settings | {'batches': 1})
  display = show_usual(workspace, model, arms) if SEQUENCES.value else None
  lossy = VERIFY.value in verify.LOSSY
  exact = not any(test.rejected for test in tests) and not any(
    check['failed'] for check in bits
  )
  moved, half = certify.leak(seen['speculative'])
  report = {
    'verdict': 'LOSSY' if lossy else 'PASS' if exact else 'FAIL',
    'rule': VERIFY.value,
    'lossy': lossy,
    'drafter': DRAFTER.value,
    'draft': DRAFT.value,
    'temperature': c['temperature'],
    'k': c['k'],
    'tokens': int(seen['speculative'].p.size),
    'tokens_per_round': metrics.summarize(*results['speculative'])[
      'tokens_per_round'
    ],
    'level': certify.LEVEL,
    'tests': [test._asdict() | {'z': test.z} for test in tests],
    'power': certify.POWER,
    'detectable_leak': certify.detectable_leak(seen['plain'], len(tests)),
    'tv_of_draft': float(seen['plain'].tv.mean()),
    'leak': moved,
    'leak_half_width': half,
    'display': display,
    'bits': bits,
    'seconds': time.perf_counter() - start,
    'device': runs.device(),
    'versions': runs.versions(),
    'config': workspace.config,
  }
  return report, {arm: certify.pit(found) for arm, found in seen.items()}


class Model(NamedTuple):
  """What every sample is drawn from and compared with."""

  target: Transformer
  warp: Warp
  direction: Trainable

  def sample(self, drafter, rule, prompts, stream, settings, done):
    """Text of one arm; equal streams have equal keys."""
    return certify.sample(
      self.target,
      drafter,
      prompts,
      key=jax.random.fold_in(jax.random.key(SEED.value), stream),
      verifier=rule,
      warp=self.warp,
      done=done,
      **settings,
    )

  def observe(self, results, done):
    """What the target says of it."""
    return certify.observe(
      self.target,
      results,
      warp=self.warp,
      direction=self.direction,
      done=done,
    )


def check_bits(model, drafter, rule, prompts, settings):
  """Text that has to be the same with equal seeds, but for near-ties."""
  keys = certify.row_keys(
    jax.random.fold_in(jax.random.key(SEED.value), 0), 0, PROMPTS * EACH
  )
  models = [model]
  if model.target.config.dtype == 'float32':
    models.append(model._replace(target=in_bfloat16(model.target)))
  kinds = {
    'greedy': (rule, warps.temperature(0.0), None),
    'sampler_match': (verify.sampler_match, model.warp, keys),
  }
  checks = []
  total = 2 * len(kinds) * len(models)
  with logs.Progress(total, 'compare', unit='batches') as bar:
    for model in models:
      for kind, (verifies, warp, keys) in kinds.items():
        model = model._replace(warp=warp)
        plain, other = (
          model.sample(*arm, prompts, 0, settings, bar.advance)[0]
          for arm in (PLAIN, (drafter, verifies))
        )
        found = certify.first_mismatches(
          model.target, plain, other, warp=warp, keys=keys
        )
        dtype = model.target.config.dtype
        widest = max((x['margin'] for x in found), default=0.0)
        checks.append(
          {
            'kind': kind,
            'dtype': dtype,
            'rows': len(plain.tokens),
            'mismatches': found,
            'widest_margin': widest,
            # bfloat16 turns near-ties that are far wider.
            'failed': dtype == 'float32' and widest > certify.NEAR_TIE,
          }
        )
  return checks


def show_usual(workspace, model, arms):
  """Plain against speculative, with plain against plain beside it."""
  prompts = workspace.prompts('test', SHOWN_PROMPTS, SHOWN_LENGTH)
  batches = -(-SEQUENCES.value // (SHOWN_PROMPTS * SHOWN_EACH))
  settings = {
    'each': SHOWN_EACH,
    'batches': batches,
    'max_new_tokens': SHOWN_TOKENS,
  }
  texts, scores = {}, {}
  samples = {**arms, 'plain again': arms['plain']}
  with logs.Progress(6 * batches, 'display', unit='batches') as bar:
    for i, (arm, parts) in enumerate(samples.items(), 2):
      results = model.sample(*parts, prompts, i, settings, bar.advance)
      p = model.observe(results, bar.advance).p
      texts[arm] = by_prompt(np.concatenate([r.new_tokens() for r in results]))
      scores[arm] = by_prompt(np.log(np.maximum(p, 1e-30)).sum(1))
  rows = []
  for arm in ('speculative', 'plain again'):
    pair = texts['plain'], texts[arm]
    log_p = certify.compare_log_probability(scores['plain'], scores[arm])
    rows.append(
      {
        'arm': arm,
        'sequences': texts['plain'].shape[0] * texts['plain'].shape[1],
        'distances': certify.compare(*pair),
        'log_probability': log_p,
      }
    )
  return rows


def by_prompt(rows):
  """`[batches * P * each, ...]` to `[P, S, ...]`."""
  rows = rows.reshape(-1, SHOWN_PROMPTS, SHOWN_EACH, *rows.shape[1:])
  rows = rows.swapaxes(0, 1)
  return rows.reshape(SHOWN_PROMPTS, -1, *rows.shape[3:])


def build(workspace, warp):
  """The drafter asked for, and the direction in which its law lies."""
  k = workspace.config['decode']['k']
  if DRAFTER.value == 'model':
    drafter = workspace.drafter(DRAFT.value, warp).at(k)
    return drafter, drafter
  drafter = NGram(k) if DRAFTER.value == 'ngram' else NoDrafter()
  return drafter, certify.Replayed(drafter)


def in_bfloat16(target):
  """The target with weights and caches of bfloat16."""
  config = dataclasses.replace(target.config, dtype='bfloat16')
  like = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  leaves, structure = jax.tree.flatten(like)
  return jax.tree.unflatten(
    structure,
    [
      x.astype(y.dtype)
      for x, y in zip(jax.tree.leaves(target), leaves, strict=True)
    ],
  )


def show(report):
  """Prints the tests, what they can see, the display and the verdict."""
  console = rich.console.Console(highlight=False)
  table = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
  )
  table.add_column('test')
  for arm in ARMS:
    table.add_column(arm, justify='right')
    table.add_column('p-value', justify='right')
    table.add_column('Holm', justify='right')
  both = [[t for t in report['tests'] if t['arm'] == arm] for arm in ARMS]
  for pair in zip(*both, strict=True):
    cells = [pair[0]['name']]
    for test in pair:
      style = '[bold red]' if test['rejected'] else '[default]'
      cells += [
        f'{test["statistic"]:.3g}',
        f'{style}{test["p_value"]:.2g}[/]',
        f'{test["threshold"]:.1e}',
      ]
    table.add_row(*cells)
  console.print(
    f'\n{report["tokens"]:,} tokens of either arm against the exact law,'
    f' {report["tokens_per_round"]:.2f} a round'
  )
  console.print(table)
  print(power(report))
  print(
    f'moved towards the draft: {report["leak"]:+.4f} ±'
    f' {report["leak_half_width"]:.4f} of mean TV per token'
  )
  for row in report['display'] or ():
    print(distances(row))
  for found in report['bits']:
    print(equal(found))
  if report['lossy']:
    print(f'{report["rule"]} is LOSSY: it has another law than the target')
  print(report['verdict'])


def power(report) -> str:
  """What the tests would have caught."""
  delta, tv = report['detectable_leak'], report['tv_of_draft']
  if math.isinf(delta):
    return 'no draft whose leak could be seen: its law is the target or nothing'
  return (
    f'a leak (1 - e)p + eq of mean TV >= {delta:.4f} per token (e >='
    f' {delta / tv:.3f}) is caught with probability >= {report["power"]:.0%}; a'
    ' fault on one token in a thousand is not'
  )


def distances(row) -> str:
  """One pair of arms in the usual display."""
  parts = [
    f'{x["n"]}-grams KL {x["kl"]:+.4f} [{x["kl_low"]:+.4f},'
    f' {x["kl_high"]:+.4f}] TV {x["tv"]:+.4f}'
    for x in row['distances']
  ]
  p_value = row['log_probability']['p_value']
  return (
    f'plain against {row["arm"]}, {row["sequences"]:,} sequences:\n  '
    + '\n  '.join(parts)
    + f'\n  log-probability: permutation p = {p_value:.2g}'
  )


def equal(check) -> str:
  """One comparison of equal seeds."""
  found = check['mismatches']
  text = f'{check["kind"]}, {check["dtype"]}: '
  if not found:
    return f'{text}{check["rows"]} rows equal plain text'
  return (
    f'{text}{len(found)} of {check["rows"]} rows leave plain text, at margins'
    f' up to {check["widest_margin"]:.2g}'
    + (': NOT LOSSLESS' if check['failed'] else '')
  )


if __name__ == '__main__':
  experiment.app(main)
