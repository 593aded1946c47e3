"""Distils a draft from a target; trains the target first if there is none.

    python train/distill.py --config configs/stdlib.py --config.loss.kl_weight=1

The same command goes on after an interruption. `--draft=NAME` keeps several
drafts of one target apart.
"""

import functools

import jax
from absl import flags
from pretrain import pretrain

from specjax import data, distill, experiment, runs, training, warps
from specjax.checkpoint import Checkpoints
from specjax.workspace import Workspace

DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")
# Validation too, or the scores of its checkpoints could not be compared.
DRAFT_SECTIONS = ('draft', 'distill', 'loss', 'validation')


def main(config, folder):
  """Opens the run and distils its draft."""
  config = config.to_dict()
  distill.objective(config['loss']['kl_weight'])  # refused before any work
  drafts = Checkpoints(folder / DRAFT.value)
  if drafts.latest() is not None:
    old = drafts.meta(drafts.latest())['config']
    runs.refuse_changes(
      drafts.directory, old, config, DRAFT_SECTIONS, flag='--draft'
    )
  workspace = Workspace.create(folder, config)
  pretrain(workspace)
  distil(workspace, DRAFT.value)


def distil(workspace: Workspace, name: str):
  """Distils a draft, from its newest checkpoint if it has one."""
  c = workspace.config['distill']
  target = workspace.target()
  drafter = workspace.new_drafter(c['seed'])
  weights = distill.objective(workspace.config['loss']['kl_weight'])
  tx = distill.optimizer(
    c['learning_rate'], c['steps'], c['warmup'], c['weight_decay'], c['clip']
  )
  update = jax.jit(
    distill.make_step(distill.distill_loss, tx), donate_argnums=0
  )
  evaluate = functools.partial(
    validate,
    measure=jax.jit(distill.measure, static_argnums=3),
    target=target,
    workspace=workspace,
  )
  training.fit(
    distill.init(drafter, tx),
    lambda state, batch: update(state, target, batch, weights),
    data.Batches(workspace.windows('train'), c['batch'], c['seed']),
    evaluate,
    steps=c['steps'],
    every=c['eval_every'],
    folder=workspace.folder / name,
    log=workspace.folder / 'logs' / name,
    meta={
      'model': workspace.draft_config,
      'tokenizer': workspace.tokenizer.hash,
      'config': {key: workspace.config[key] for key in DRAFT_SECTIONS},
    },
    score=lambda values: values['block_efficiency'],
    show=('acceptance', 'block_efficiency'),
    tokens=c['batch'] * workspace.config['corpus']['window'],
  )
  final = evaluate(workspace.drafter(name))  # the best of the checkpoints
  print(
    f'{name}: acceptance {final["acceptance"]:.3f}, block efficiency'
    f' {final["block_efficiency"]:.2f} at K ='
    f' {workspace.config["decode"]["k"]}, on text that the target wrote'
  )


def validate(drafter, measure, target, workspace: Workspace):
  """What `distill.measure` measures, on held-out text by the target."""
  c = workspace.config['decode']
  rollouts = workspace.rollouts(target, c['temperature'])
  warp = warps.temperature(c['temperature'])
  parts = (
    measure(drafter, target, warp, c['k'], batch)
    for batch in data.in_order(rollouts, 16)
  )
  return {name: float(value) for name, value in distill.means(parts).items()}


if __name__ == '__main__':
  experiment.app(main, default='configs/stdlib.py', resumable=True)
