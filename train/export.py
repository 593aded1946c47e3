"""Writes a distilled draft in Hugging Face's layout, for other software.

    python train/export.py --workdir runs/pretrained
    python train/export.py --workdir runs/pretrained --draft=target

The folder loads in `transformers`, as a model and as an `assistant_model`, and
in servers that read such folders. Only a draft that is a model of its own can
be exported: heads and EAGLE need a server that knows their features.
`--draft=target` exports the run's target.
"""

from pathlib import Path

import jax
from absl import flags

from specjax import checkpoint, experiment, files, logs
from specjax.models import card, huggingface
from specjax.workspace import UNTRAINED, Workspace

DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")
OUTPUT = flags.DEFINE_string(
  'output', None, 'folder to write (default: exported/DRAFT in the run)'
)

FIGURES = {  # of an evaluation, by what a card calls them
  'acceptance': 'acceptance rate α',
  'block_efficiency': 'tokens per round',
}


def main(config, folder):
  """Opens the run and writes the folder."""
  config = config.to_dict()
  workspace = Workspace.look_at(folder, config)
  name = DRAFT.value
  path = Path(OUTPUT.value or folder / 'exported' / name)
  if path.exists() and any(path.iterdir()) and not huggingface.is_ours(path):
    raise ValueError(
      f'{path} holds something else than an export: name another folder with'
      ' --output'
    )
  if name == UNTRAINED:
    raise ValueError('untrained is no draft to export: name one of the run')
  model = workspace.target() if name == 'target' else draft(workspace, name)
  adopted = checkpoint.Checkpoints(folder / 'target')
  record = adopted.meta(adopted.best())
  padded = record.get('vocab_size')
  with files.whole(path) as partial:
    huggingface.save(model, partial, workspace.tokenizer, padded)
    if name != 'target':
      made = made_with(folder / name)
      card.write(
        partial,
        name=name,
        target=config['target']['path'] or f'the target of {folder.name}',
        target_licence=record.get('licence', card.UNKNOWN),
        kind=huggingface.describe(model.config)['architectures'][0],
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model)),
        figures=figures(workspace, name),
        temperature=made['decode']['temperature'],
        config=made,
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
  """What the best checkpoint was measured at, by what a card calls it."""
  best = checkpoint.Checkpoints(workspace.folder / name).best()
  values = {}
  for record in logs.read(workspace.folder / 'logs' / f'{name}.jsonl'):
    if record['step'] <= best:
      values |= record
  return {text: values[key] for key, text in FIGURES.items() if key in values}


def made_with(folder):
  """The configuration that a draft was made with, its real sizes in it."""
  drafts = checkpoint.Checkpoints(folder)
  meta = drafts.meta(drafts.best())
  sizes = {'model': meta['model']['model']}
  return meta['config'] | {'draft': meta['config']['draft'] | sizes}


if __name__ == '__main__':
  experiment.app(main)
