"""Distils a draft from a target; trains the target first if there is none.

    python train/distill.py --config configs/stdlib.py --config.loss.kl_weight=1

The same command goes on after an interruption. `--draft=NAME` keeps several
drafts of one target apart.
"""

from absl import flags
from pretrain import pretrain

from specjax import distill, experiment, recipes

DRAFT = flags.DEFINE_string('draft', 'draft', "the draft's folder in the run")


def main(config, folder):
  """Opens the run and distils its draft."""
  config = config.to_dict()
  distill.objective(config['loss']['kl_weight'])  # refused before any work
  recipes.refuse_draft_name(DRAFT.value)
  recipes.refuse_other_draft(folder / DRAFT.value, config, flag='--draft')
  workspace = recipes.open_to_train(folder, config, 'pretrain', 'distill')
  pretrain(workspace)
  final = recipes.distil(workspace, workspace.target(), DRAFT.value)
  print(
    f'{DRAFT.value}: acceptance {final["acceptance"]:.3f}, block efficiency'
    f' {final["block_efficiency"]:.2f} at K = {config["decode"]["k"]}, on text'
    ' that the target wrote'
  )


if __name__ == '__main__':
  experiment.app(
    main, default='configs/stdlib.py', resumable=True, distributed=True
  )
