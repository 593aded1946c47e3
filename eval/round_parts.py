"""Where the time of a round goes: `eval/speedup.py --profile`."""

import shutil

from specjax import (
  contest,
  generation,
  printing,
  profiling,
  runs,
  verify,
  warps,
  weights,
)
from specjax.drafters.none import NoDrafter

OUTPUT, TRACE = 'profile.json', 'profile'


def measure(workspace, ways, top_p):
  """Times plain rounds and those of ways to draft, part by part; prints them.

  Args:
    workspace: the run.
    ways: to draft.
    top_p: of the warp, behind `config.decode.temperature`; 1 is none.
  """
  c = workspace.config['decode']
  folder, batch = workspace.folder, min(workspace.config['speedup']['batches'])
  warp = warps.temperature(c['temperature'])
  if top_p < 1:
    warp = warps.compose(warp, warps.TopP(top_p))
  drafters = {'none': NoDrafter()}
  for way in ways:
    drafters[way.name] = way.drafter(workspace, c['temperature'])
  target, *made = generation.pack(
    workspace.target(), *drafters.values(), batch=batch
  )
  drafters = dict(zip(drafters, made, strict=True))
  rules = {c['verify']: verify.find(c['verify'])}
  contest.pair(target, drafters, rules)  # refused before anything is timed
  rule = verify.as_pytree(rules[c['verify']])
  report = {
    'device': runs.device(),
    'versions': runs.versions(),
    'batch': batch,
    'context': c['prompt_length'] + c['max_new_tokens'],
    'top_p': top_p,
    'packed': weights.is_packed(target),
    'bytes_per_second': profiling.bandwidth(),
    'rounds': {},
    'config': workspace.config,
  }
  sizes = {
    'batch': report['batch'],
    'prompt_length': c['prompt_length'],
    'context': report['context'],
  }
  for name, drafter in drafters.items():
    arguments = profiling.begin(target, drafter, rule, warp, **sizes)
    found = profiling.parts(*arguments, rate=report['bytes_per_second'])
    report['rounds'][name] = {k: v._asdict() for k, v in found.items()}
    runs.write_json(folder / OUTPUT, runs.portable(report))
    place = folder / TRACE / name.replace('/', '_')
    shutil.rmtree(place, ignore_errors=True)  # else an older one would be shown
    profiling.trace(str(place), arguments)
  show(report)
  print(f'traces, for ui.perfetto.dev or TensorBoard: {folder / TRACE}')
  print('numbers:', folder / OUTPUT)


def show(report):
  """Prints a table: a row for each part, a pair of columns for each way."""
  rounds = report['rounds']
  console = printing.console(16 + 24 * len(rounds))
  packed = ', packed weights' if report['packed'] else ''
  console.print(
    f'\na round at batch {report["batch"]}, for texts of'
    f' {report["context"]} tokens, T ='
    f' {report["config"]["decode"]["temperature"]:g}, top-p'
    f' {report["top_p"]:g}{packed}: ms and share of it, and the floor in ms'
  )
  table = printing.table('')
  for name in rounds:
    printing.add(table, name, 'floor')
  for part in (*profiling.PARTS, profiling.REST, profiling.ROUND):
    cells = []
    for found in rounds.values():
      seconds, floor = found[part]['seconds'], found[part]['floor']
      share = seconds / found[profiling.ROUND]['seconds']
      cells.append(f'{1e3 * seconds:.2f} {share:4.0%}')
      cells.append(f'{1e3 * floor:.2f}' if floor else '')
    bold = part == profiling.ROUND
    table.add_row(part, *cells, style='bold' if bold else None)
  console.print(table)
  console.print(
    'every part by itself, in loops, in turns with whole rounds; what they'
    ' leave is the rest; a floor is the time in which its bytes come from'
    f' memory, at {report["bytes_per_second"] / 1e9:.0f} GB/s'
  )
