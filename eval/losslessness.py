"""Certifies that what a run's decoder writes has the law of its target.

    python eval/losslessness.py
    python eval/losslessness.py --drafter=ngram --verify=block

Without arguments it takes the newest run. Says PASS, with exit code 0, or FAIL,
with 1; a lossy rule is called so, is reported with what it changes, and never
passes. `specjax.certify` explains the tests and what they cannot see. It writes
`losslessness.json` and `losslessness.png` into the run.
"""

import dataclasses
import time

import jax
from absl import flags
from flax import nnx

from specjax import (
  certify,
  draft_length,
  experiment,
  metrics,
  plots,
  printing,
  proposers,
  runs,
  verify,
  warps,
)
from specjax.certify import tiers
from specjax.certify.display import CELLS
from specjax.models.transformer import Transformer
from specjax.workspace import Workspace

NUM_TOKENS = flags.DEFINE_integer(
  'num_tokens', 20_000, 'to test, of each arm; more see smaller faults'
)
TABLES = flags.DEFINE_integer(
  'tables', 20, 'random ones that the rule is enumerated on, in each shape'
)
SEQUENCES = flags.DEFINE_integer(
  'sequences', 10_000, 'short ones of each arm to display; 0 shows none'
)
DRAFTER = flags.DEFINE_enum(
  'drafter', 'model', proposers.KINDS, 'model: the distilled draft'
)
DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")
BRANCHING = flags.DEFINE_list(
  'branching',
  None,
  "children of a node of a tree, by depth (default: the draft's own, or 2,2)",
)
NODES = flags.DEFINE_integer(
  'nodes', None, 'of a tree of candidates, the best for its draft'
)
VERIFY = flags.DEFINE_string(
  'verify',
  None,
  'a rule of specjax.verify, or module:function (default: config.decode)',
)
TEMPERATURE = flags.DEFINE_float(
  'temperature', None, '0 is greedy (default: config.decode)'
)
K = flags.DEFINE_integer('k', None, 'draft length (default: config.decode)')
DRAFT_LENGTH = flags.DEFINE_enum(
  'draft_length',
  None,
  draft_length.CONTROLLERS,
  'how the draft length is chosen (default: config.decode)',
)
SEED = flags.DEFINE_integer(
  'seed', 0, 'another one, another text', 0, 2**31 - 1
)

FEWEST = 1000  # tokens, so that 64 cells are filled at every lag
PROMPTS, EACH = 8, 4  # a batch is 4 rows of each of 8 prompts
# The display: first tokens behind short prompts, where laws are flat.
SHOWN = {'each': 8, 'max_new_tokens': 4}
SHOWN_PROMPTS, SHOWN_LENGTH = 4, 4
# Batched products in bfloat16 are slow on a CPU: just enough for some ties.
HALF = {'each': 2, 'max_new_tokens': 32}
HALF_PROMPTS = 2


def main(config, folder):
  """Measures, writes, prints."""
  config = config.to_dict()
  for flag, key in (
    (TEMPERATURE, 'temperature'),
    (DRAFT_LENGTH, 'draft_length'),
    (VERIFY, 'verify'),
  ):
    if flag.value is not None:
      config['decode'][key] = flag.value
  check()
  rule = verify.find(config['decode']['verify'])
  workspace = Workspace.look_at(folder, config, k=K.value)
  report, transforms = measure(workspace, rule)
  runs.write_json(folder / 'losslessness.json', runs.portable(report))
  picture = plots.losslessness(
    folder / 'losslessness.png',
    transforms,
    report['tests'],
    report['display'],
    f'{report["drafter"]}, {report["rule"]}: {report["verdict"]}',
  )
  show(report)
  print('picture:', picture)
  print('numbers:', folder / 'losslessness.json')
  print(report['verdict'])
  return 0 if report['verdict'] == 'PASS' else 1


def check():
  """Refuses what cannot be measured, before any work."""
  branching()
  if NUM_TOKENS.value < FEWEST:
    raise ValueError(
      f'--num_tokens is {NUM_TOKENS.value}: the tests need at least {FEWEST}'
    )
  if TABLES.value < 1:
    raise ValueError(f'--tables is {TABLES.value}: at least 1')
  if SEQUENCES.value < 0:
    raise ValueError(f'--sequences is {SEQUENCES.value}: 0 or more')


def branching():
  """Children by depth, if they are said."""
  given = BRANCHING.value
  return None if given is None else experiment.numbers('--branching', given)


def measure(workspace, rule):
  """The report, and the transforms of both arms, to draw."""
  start = time.perf_counter()
  c = workspace.config['decode']
  warp = warps.temperature(c['temperature'])
  target = workspace.target()
  drafter = proposers.make(
    workspace,
    DRAFTER.value,
    DRAFT.value,
    warp,
    branching(),
    k=K.value,
    nodes=NODES.value,
  )
  subject = tiers.Subject(
    target,
    drafter,
    rule,
    warp,
    proposers.direction(workspace, DRAFTER.value, DRAFT.value, warp),
    jax.random.key(SEED.value),
    workspace.controller(DRAFTER.value, target, drafter, batch=PROMPTS * EACH),
  )
  prompts = workspace.prompts('test', PROMPTS, c['prompt_length'])
  found = tiers.certify(
    subject,
    c['verify'],
    prompts,
    tokens=NUM_TOKENS.value,
    depth=drafter.k if NODES.value else c['k'],
    each=EACH,
    max_new_tokens=c['max_new_tokens'],
    tables=tiers.on_tables(c['verify'], rule, TABLES.value),
    float32=target.config.dtype == 'float32',
  )
  half = subject._replace(target=in_bfloat16(subject.target))
  near = tiers.with_equal_seeds(half, prompts[:HALF_PROMPTS], **HALF)
  display = []
  if SEQUENCES.value:
    shown_length = min(SHOWN_LENGTH, c['prompt_length'])
    display = tiers.against_plain_text(
      subject,
      workspace.prompts('test', SHOWN_PROMPTS, shown_length),
      batches=-(-SEQUENCES.value // (SHOWN_PROMPTS * SHOWN['each'])),
      **SHOWN,
    )

  report = {
    'drafter': DRAFTER.value,
    'draft': DRAFT.value,
    'rule': c['verify'],
    'draft_length': c['draft_length'],
    'k': c['k'],
    'temperature': c['temperature'],
    **metrics.summarize(*found.text[tiers.SPECULATIVE]),
    **found.summary(),
    'equal_seeds_bfloat16': near,
    'display': display,
    'seconds': time.perf_counter() - start,
    'device': runs.device(),
    'versions': runs.versions(),
    'config': workspace.config,
  }
  return report, {arm: certify.pit(seen) for arm, seen in found.seen.items()}


def in_bfloat16(target):
  """The target with weights and caches of bfloat16."""
  config = dataclasses.replace(target.config, dtype='bfloat16')
  like = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  kinds, structure = jax.tree.flatten(like)
  leaves = zip(jax.tree.leaves(target), kinds, strict=True)
  return jax.tree.unflatten(structure, [x.astype(y.dtype) for x, y in leaves])


def show(report):
  """Prints the tests, what they can see, and what does not decide."""
  table = printing.table('test')
  for arm in tiers.ARMS:
    printing.add(table, arm, 'p-value', 'fails at')
  both = ([t for t in report['tests'] if t['arm'] == a] for a in tiers.ARMS)
  for pair in zip(*both, strict=True):
    cells = [pair[0]['name']]
    for test in pair:
      mark = '[bold red]' if test['rejected'] else '[default]'
      cells += [
        f'{test["statistic"]:.3g}',
        f'{mark}{test["p_value"]:.2g}[/]',
        f'{test["threshold"]:.1e}',
      ]
    table.add_row(*cells)
  print(
    f'{report["tokens"]:,} tokens of either arm against the exact law;'
    f' {report["tokens_per_round"]:.2f} tokens per round'
  )
  printing.console(96).print(table)
  print(power(report))
  print(moved(report))
  if report['tables']:
    print(enumerated(report['tables'], report['rule']))
  for found in report['equal_seeds']:
    print(equal_seeds(found))
  for found in report['equal_seeds_bfloat16']:
    print(equal_seeds(found), '(bfloat16, which does not decide)')
  if report['display']:
    print(
      f'samples against samples in tables of {CELLS} cells, less what two'
      ' samples of one law differ by; which does not decide:'
    )
  for row in report['display']:
    print(distances(row))
  if report['verdict'] == 'LOSSY':
    print(f"{report['rule']} is lossy: its law is not the target's")


def moved(report) -> str:
  """How far the text leans towards the draft."""
  leak, half = report['leak'], report['leak_half_width']
  text = f'moved towards the draft by {leak:+.4f} ± {half:.4f} per token'
  if abs(leak) > half:
    text += f'; the mean TV is at least {abs(leak) - half:.4f} (95 %)'
  return text


def power(report) -> str:
  """What the tests would have caught."""
  delta, tv = report['detectable_leak'], report['tv_of_draft']
  if delta > tv:
    return (
      'no leak would be caught: the draft is too near, or the text too short'
    )
  return (
    f'caught with probability {report["power"]:.0%}: a leak (1 - e)p + eq of'
    f' mean TV {delta:.4f} per token (e = {delta / tv:.3f})'
    + (', but no fault on one token in a thousand' if delta > 1e-3 else '')
  )


def enumerated(tables, rule) -> str:
  """What the rule does on small tables."""
  worst = max(row['deviation'] for row in tables)
  count = sum(row['tables'] for row in tables)
  text = (
    f'enumerated on {count} tables of {len(tables)} shapes: no probability is'
    f' off by more than {worst:.1e}'
  )
  gains = [row['least_gain'] for row in tables if 'least_gain' in row]
  if gains:
    text += f'; tokens per round over rejection: {min(gains):+.1e} or more'
  if rule not in verify.RULES:
    text += ' (does not decide: that holds only if the rule reports its tests)'
  return text


def equal_seeds(found) -> str:
  """How text compares with plain text of equal seeds."""
  count = len(found['mismatches'])
  if not count:
    return f'{found["kind"]}: all {found["rows"]} rows are plain text'
  return (
    f'{found["kind"]}: {count} of {found["rows"]} rows leave plain text, at'
    f' margins up to {found["widest_margin"]:.2g}'
  )


def distances(row) -> str:
  """One pair of arms in the usual display."""
  lines = [
    f'plain against {row["arm"]}, {row["sequences"]:,} sequences of'
    f' {SHOWN["max_new_tokens"]} tokens each'
  ]
  lines += [
    f'{x["n"]}-grams: KL {x["kl"]:+.4f} [{x["kl_low"]:+.4f},'
    f' {x["kl_high"]:+.4f}], TV {x["tv"]:+.4f} [{x["tv_low"]:+.4f},'
    f' {x["tv_high"]:+.4f}]'
    for x in row['distances']
  ]
  ks = row['log_probability']
  lines.append(
    f'log-probability: KS {ks["statistic"]:.3f}, p {ks["p_value"]:.2g}'
  )
  return '\n  '.join(lines)


if __name__ == '__main__':
  experiment.app(main)
