"""What the verification rules accept and cost, on a run's draft.

    python eval/rules.py

Without arguments it takes the newest run. Rounds are decoded with `rejection`,
and `block` and `sampler_match` are asked what they would accept of the same
drafts: by their own probabilities, so that no luck is in the difference. Then
plain decoding, `rejection` and `block` decode the same prompts
in turns, and each rule is timed alone on a large vocabulary. Writes
`rules.json` into the run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.table
from absl import flags

from specjax import (
  decode,
  draws,
  experiment,
  generation,
  logs,
  metrics,
  runs,
  timing,
  verify,
  warps,
)
from specjax.drafters.none import NoDrafter
from specjax.types import Block, Draft, Noise
from specjax.workspace import Workspace

DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")
KS = flags.DEFINE_list('ks', ['4', '8'], 'draft lengths')
VOCAB = flags.DEFINE_integer('vocab', 32000, 'of the timed rules')
PROMPTS = flags.DEFINE_integer('prompts', 16, 'decoded together')
NEVER = jnp.zeros(0, jnp.int32)


def main(config, folder):
  """Measures, writes, prints."""
  config = config.to_dict()
  ks = experiment.numbers('--ks', KS.value)
  if min(VOCAB.value - 1, PROMPTS.value) < 1:
    raise ValueError(
      f'--vocab is {VOCAB.value} and --prompts {PROMPTS.value}: at least 2'
      ' and 1'
    )
  workspace = Workspace.look_at(folder, config)
  c, repeats = config['decode'], config['speedup']['repeats']
  warp = warps.temperature(c['temperature'])
  target = workspace.target()
  drafter = workspace.drafter(DRAFT.value, warp)
  size = c['prompt_length']
  prompts = workspace.prompts('test', PROMPTS.value, size)
  accepted, speed, cost = [], [], []
  total = len(ks) * (2 + repeats * len(prompts))
  with logs.Progress(total, 'rules', unit='steps') as progress:
    done = progress.advance
    for k in ks:
      own = drafter.at(k)
      state = start(target, own, prompts, c['max_new_tokens'])
      accepted.append({'k': k} | on_the_same_rounds(target, own, warp, state))
      progress.advance()
      states = [
        start(target, own, [prompt], c['max_new_tokens']) for prompt in prompts
      ]
      speed.append(
        {'k': k} | in_turns(target, own, warp, states, repeats, done)
      )
      cost += alone(k, VOCAB.value, repeats, speed[-1]['seconds_per_round'])
      progress.advance()
  report = {
    'device': runs.device(),
    'versions': runs.versions(),
    'temperature': c['temperature'],
    'accepted': accepted,
    'speed': speed,
    'cost': cost,
    'config': config,
  }
  runs.write_json(folder / 'rules.json', runs.portable(report))
  show(report)
  print('numbers:', folder / 'rules.json')


def start(target, drafter, prompts, new):
  """A state at the end of the prompts."""
  key = jax.random.key(0)
  return generation.start(target, drafter, prompts, key=key, max_new_tokens=new)


def on_the_same_rounds(target, drafter, warp, state):
  """Expected accepted tokens of a round, by rule, over all live rounds."""

  @jax.jit
  def round_(state):
    after, seen = decode.step(
      target, drafter, verify.rejection, warp, NEVER, state
    )
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
    block = Block(jnp.concatenate([pending, seen.draft.tokens], 1))
    output, _ = target.extend(block, state.cache)
    k = seen.draft.tokens.shape[1]
    log_p = jax.nn.log_softmax(warp(target.unembed(output.features[:, :k])))
    log_q = jax.nn.log_softmax(seen.draft.logits)
    at = seen.draft.tokens[..., None]
    log_px, log_qx = (
      jnp.take_along_axis(law, at, -1)[..., 0] for law in (log_p, log_q)
    )
    return (
      after,
      ~state.done,
      {
        'rejection': metrics.expected_accepted(log_px - log_qx),
        'block': metrics.expected_accepted(log_px - log_qx, jointly=True),
        'sampler_match': metrics.expected_accepted(log_px),
      },
    )

  values, weights = [], []
  while not state.done.all():
    state, live, expected = round_(state)
    values.append(jax.device_get(expected))
    weights.append(np.asarray(live))
  live = np.concatenate(weights)
  by_rule = {
    rule: np.concatenate([value[rule] for value in values])[live]
    for rule in values[0]
  }
  gain = by_rule['block'] - by_rule['rejection']
  mean, half = metrics.confidence_interval(gain.tolist())
  return {
    'rounds': int(live.sum()),
    **{rule: float(value.mean()) for rule, value in by_rule.items()},
    'block_gain': mean,
    'block_gain_half_width': half,
    'block_gain_least': float(gain.min()),
  }


def in_turns(target, drafter, warp, states, repeats, done):
  """Speed of plain decoding, `rejection` and `block`, prompt by prompt."""
  advance = jax.jit(decode.advance)
  arms = {
    'none': (NoDrafter(), verify.rejection),
    'rejection': (drafter, verify.rejection),
    'block': (drafter, verify.block),
  }
  plain = [state._replace(memory=()) for state in states]

  def call(own, rule, state):
    rule = verify.as_pytree(rule)
    return functools.partial(
      advance, target, own, rule, warp, NEVER, state, decode.FOREVER
    )

  calls = {
    name: [call(*arm, state) for state in (states if name != 'none' else plain)]
    for name, arm in arms.items()
  }
  for parts in calls.values():
    jax.block_until_ready(parts[0]())
  seconds, ends = timing.alternate(calls, repeats, done)
  rounds = {
    name: sum(int(s.stats.rounds[0]) for s in part)
    for name, part in ends.items()
  }
  return {
    'seconds_per_round': float(np.median(seconds['rejection']))
    / rounds['rejection'],
    **{
      name: {
        'speedup': timing.ratio(seconds['none'], seconds[name]).median,
        'tokens_per_round': rounds['none'] / rounds[name],
      }
      for name in ('rejection', 'block')
    },
  }


def alone(k, vocab, repeats, round_seconds):
  """Seconds of each rule on one random draft of k tokens, or of a tree."""
  keys = jax.random.split(jax.random.key(0), 5)
  spread = 2.0 * jax.random.normal(keys[0], (1, k + 1, vocab))
  logits = spread[:, :k] + jax.random.normal(keys[1], (1, k, vocab))
  tokens = jax.vmap(jax.vmap(draws.gumbel))(
    jax.random.split(keys[2], (1, k)), logits
  )
  noise = Noise(
    jnp.log1p(-jax.random.uniform(keys[3], (1, k))),
    jax.random.split(keys[4], (1, k + 1)),
  )
  chain = Draft(tokens, logits=logits)
  # A binary tree of as many nodes, to be timed: siblings have other laws.
  parents = (jnp.arange(k)[None] - 2) // 2
  tree = Draft(tokens, parents, logits, siblings='iid')
  cases = [(name, chain, 'chain') for name in verify.RULES] + [
    (name, tree, 'tree')
    for name in ('rejection', 'traversal', 'k_seq', 'sampler_match')
  ]
  calls = {}
  for name, draft, shape in cases:
    rule = verify.RULES[name]

    @jax.jit
    def decide(noise, draft, logits, rule=rule):
      # The laws are part of every rule's price.
      log_p = jax.nn.log_softmax(logits)
      verdict = jax.vmap(rule)(noise, draft, log_p)
      return verdict.accepted, verdict.law

    call = functools.partial(decide, noise, draft, spread)
    jax.block_until_ready(call())
    calls[name, shape] = [call]
  seconds, _ = timing.alternate(calls, max(repeats, 9))  # they are short
  return [
    {
      'k': k,
      'rule': name,
      'shape': shape,
      'milliseconds': 1e3 * float(np.median(times)),
      'share_of_a_round': float(np.median(times)) / round_seconds,
    }
    for (name, shape), times in seconds.items()
  ]


def show(report):
  """Prints the three tables."""
  table = rich.table.Table(title='expected accepted tokens of the same drafts')
  for column in ('K', 'rounds', 'rejection', 'block', 'sampler_match', 'gain'):
    table.add_column(column, justify='right')
  for row in report['accepted']:
    table.add_row(
      f'{row["k"]}',
      f'{row["rounds"]}',
      *(f'{row[rule]:.3f}' for rule in ('rejection', 'block', 'sampler_match')),
      f'{row["block_gain"]:+.4f} ± {row["block_gain_half_width"]:.4f},'
      f' least {row["block_gain_least"]:+.1e}',
    )
  rich.print(table)
  table = rich.table.Table(title='in turns, batch 1, against plain decoding')
  for column in ('K', 'rule', 'tokens/round', 'speedup'):
    table.add_column(column, justify='right')
  for row in report['speed']:
    for rule in ('rejection', 'block'):
      found = row[rule]
      table.add_row(
        f'{row["k"]}',
        rule,
        f'{found["tokens_per_round"]:.2f}',
        f'{found["speedup"]:.2f}x',
      )
  rich.print(table)
  table = rich.table.Table(title=f'alone, {VOCAB.value:,} tokens')
  for column in ('K', 'rule', 'draft', 'ms', "of the run's round"):
    table.add_column(column, justify='right')
  for row in report['cost']:
    lossy = ' (LOSSY)' if row['rule'] in verify.LOSSY else ''
    table.add_row(
      f'{row["k"]}',
      row['rule'] + lossy,
      row['shape'],
      f'{row["milliseconds"]:.2f}',
      f'{row["share_of_a_round"]:.1%}',
    )
  rich.print(table)


if __name__ == '__main__':
  experiment.app(main)
