"""Writes a distilled draft in Hugging Face's layout, for other software.

    python train/export.py --workdir runs/smollm2 --draft=small
    python train/export.py --workdir runs/smollm2 --draft=target

The folder loads in `transformers`, as a model and as an `assistant_model`, and
in servers that read such folders. Only a draft that is a model of its own can
be exported: heads and EAGLE need a server that knows their features.
`--draft=target` exports the run's target.
"""

from pathlib import Path

import jax
from absl import flags

from specjax import checkpoint, experiment, logs, runs
from specjax.models import card, huggingface
from specjax.workspace import Workspace

DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")
OUTPUT = flags.DEFINE_string(
  'output', None, 'folder to write (default: exported/DRAFT in the run)'
)

FIGURES = {  # of an evaluation, by what a card calls them
  'acceptance': 'acceptance rate α at temperature 1',
  'block_efficiency': 'tokens per round',
}


def main(config, folder):
  """Opens the run and writes the folder."""
  config = config.to_dict()
  workspace = Workspace.look_at(folder, config)
  name = DRAFT.value
  path = Path(OUTPUT.value or folder / 'exported' / name)
  if (path / 'config.json').exists() and not is_export(path):
    raise ValueError(
      f'{path} has another config.json: name another folder with --output'
    )
  model = workspace.target() if name == 'target' else draft(workspace, name)
  adopted = checkpoint.Checkpoints(folder / 'target')
  record = adopted.meta(adopted.best())
  padded = record.get('vocab_size')
  huggingface.save(model, path, workspace.tokenizer, padded)
  if name != 'target':
    card.write(
      path,
      name=name,
      target=config['target']['path'] or f'the target of {folder.name}',
      target_licence=record.get('licence', card.UNKNOWN),
      parameters=sum(leaf.size for leaf in jax.tree.leaves(model)),
      figures=figures(workspace, name),
      config=made_with(folder / name),
    )
  print(f'{name}: written to {path}')


def draft(workspace, name):
  """The model of a draft.

  Raises:
    ValueError: it is none.
  """
  drafter = workspace.drafter(name)
  if not hasattr(drafter, 'model'):
    raise ValueError(
      f'{name} is a {type(drafter).__name__} and reads the features of its'
      ' target: only a draft that is a model of its own can be exported'
    )
  return drafter.model


def figures(workspace, name):
  """What the best checkpoint was measured at."""
  drafts = checkpoint.Checkpoints(workspace.folder / name)
  best = drafts.best()
  values = {}
  for record in logs.read(workspace.folder / 'logs' / f'{name}.jsonl'):
    if record['step'] <= best:
      values |= record
  found = {text: values[key] for key, text in FIGURES.items() if key in values}
  speedup = workspace.folder / 'speedup.json'
  if speedup.exists():
    report = runs.read_json(speedup)
    if report['draft'] == name:
      found[f'speedup at K = {report["k"]}, batch {report["batch"]}'] = report[
        'speedup'
      ]
  return found


def made_with(folder):
  """The configuration that a draft was made with."""
  drafts = checkpoint.Checkpoints(folder)
  return drafts.meta(drafts.best())['config']


def is_export(path):
  """Whether a folder holds an earlier export, which may be replaced."""
  return (path / 'model.safetensors').exists()


if __name__ == '__main__':
  experiment.app(main)
