"""Continues a prompt, and shows where each token came from.

    python eval/generate.py --prompt "def main("

On a terminal the text is coloured as its rounds complete: drafted tokens that
were accepted, the correction after one that was not, the bonus after a whole
draft. Elsewhere it is plain text; figures always go to stderr.
"""

import os
import sys
import time

import jax
import rich.console
import rich.style
from absl import flags
from rich.color import ColorSystem

from specjax import (
  decode,
  draft_length,
  experiment,
  footprint,
  generation,
  metrics,
  proposers,
  sharding,
  verify,
  warps,
)
from specjax.workspace import Workspace

PROMPT = flags.DEFINE_string('prompt', 'def main(', 'what to continue')
TOKENS = flags.DEFINE_integer(
  'tokens', None, 'at most so many new ones (default: config.decode)'
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
TENSOR = flags.DEFINE_integer(
  'tensor', 1, 'devices that every layer is divided over'
)
SEED = flags.DEFINE_integer(
  'seed', 0, 'another one, another text', 0, 2**31 - 1
)

ROUNDS = 4  # between looks at the device: smooth to read, cheap to do
STYLES = {
  decode.ACCEPTED: ('accepted', 'green'),
  decode.CORRECTED: ('corrected', 'bold red'),
  decode.BONUS: ('bonus', 'cyan'),
}
# What a model writes must not command the terminal: control characters are
# shown as their pictures.
VISIBLE = {i: 0x2400 + i for i in range(32) if chr(i) not in '\n\t'}
VISIBLE |= {127: 0x2421} | {i: 0xFFFD for i in range(128, 160)}


def main(config, folder):
  """Opens the run and generates."""
  config = config.to_dict()
  for flag, key in (
    (TOKENS, 'max_new_tokens'),
    (TEMPERATURE, 'temperature'),
    (DRAFT_LENGTH, 'draft_length'),
  ):
    if flag.value is not None:
      config['decode'][key] = flag.value
  warp = warps.temperature(config['decode']['temperature'])
  if not 1 <= TENSOR.value <= jax.device_count():
    raise ValueError(
      f'--tensor is {TENSOR.value}, and devices here: {jax.device_count()}'
    )
  mesh = sharding.make(tensor=TENSOR.value)
  workspace = Workspace.look_at(folder, config, k=K.value, mesh=mesh)
  console = rich.console.Console(highlight=False)
  coloured = console.color_system is not None and not console.no_color
  write = paint if coloured else plain
  try:
    generate(workspace, warp, write)
    sys.stdout.flush()
  except BrokenPipeError:
    # Whoever read has enough. What is buffered goes nowhere, at exit too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return
  if coloured:
    legend = (paint(name, origin) for origin, (name, _) in STYLES.items())
    print('\n' + ' '.join(legend))


def generate(workspace: Workspace, warp, write):
  """Streams to stdout; `write(text, origin)` dresses a piece."""
  c, tokenizer = workspace.config['decode'], workspace.tokenizer
  target = workspace.target()
  branching = BRANCHING.value
  if branching is not None:
    branching = experiment.numbers('--branching', branching)
  drafter = proposers.make(
    workspace,
    DRAFTER.value,
    DRAFT.value,
    warp,
    branching,
    k=K.value,
    nodes=NODES.value,
  )
  target, drafter = generation.pack(target, drafter)
  controller = workspace.controller(DRAFTER.value, target, drafter)
  prompt = tokenizer.start + tokenizer.encode(PROMPT.value)
  prompt = prompt or [tokenizer.eos_id]
  state = generation.start(
    target,
    drafter,
    [prompt],
    key=jax.random.key(SEED.value),
    max_new_tokens=c['max_new_tokens'],
    controller=controller,
    mesh=workspace.mesh,
  )
  if workspace.mesh:  # before the loop is compiled
    size = state.tokens.shape[1]
    plan = footprint.plan(target, drafter, 1, size, workspace.mesh, controller)
    print(plan, file=sys.stderr)
  eos = generation.end_ids(target, tokenizer.end_ids)
  rule = verify.as_pytree(verify.find(c['verify']))
  arguments = target, drafter, rule, warp, eos
  advance = generation.advance.lower(
    *arguments, state, ROUNDS, controller, mesh=workspace.mesh
  ).compile()
  stream = tokenizer.stream()
  print(write(PROMPT.value, decode.PROMPT), end='', flush=True)
  result, seconds, shown = None, 0.0, len(prompt)
  try:
    while not (result and state.done.all()):
      start = time.perf_counter()
      state = advance(*arguments, state, ROUNDS, controller)
      result = generation.finish(state, [len(prompt)])
      seconds += time.perf_counter() - start
      for at in range(shown, int(result.length[0])):
        piece = stream.push(int(result.tokens[0, at]))
        print(write(piece, int(result.stats.origin[0, at])), end='')
      sys.stdout.flush()
      shown = int(result.length[0])
  finally:
    print(write(stream.flush(), decode.BONUS), flush=True)
    if result:
      report(metrics.summarize(result), seconds, c)


def report(summary, seconds, c):
  """What it took, on stderr."""
  rate = summary['acceptance_rate']
  accepted = 'no drafts' if rate is None else f'{rate:.1%} of drafts accepted'
  per_round = summary['tokens_per_round'] or 0.0
  print(
    f'{accepted}, {per_round:.2f} tokens per round,'
    f' {summary["tokens"] / seconds:,.0f} tokens/s: {summary["tokens"]} tokens'
    f' in {summary["rounds"]} rounds, K = {c["k"]}, T = {c["temperature"]:g}',
    file=sys.stderr,
  )
  if verify.is_lossy(c['verify']):
    print(
      f'LOSSY: {c["verify"]} does not keep the law of the target',
      file=sys.stderr,
    )


def paint(text: str, origin: int) -> str:
  """A piece in the colour of its origin."""
  style = STYLES[origin][1] if origin in STYLES else 'bold'
  return rich.style.Style.parse(style).render(
    text.translate(VISIBLE), color_system=ColorSystem.STANDARD
  )


def plain(text: str, origin: int) -> str:
  """A piece as it is."""
  del origin
  return text


if __name__ == '__main__':
  experiment.app(main, may_be_empty=('prompt',))
