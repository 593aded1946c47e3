"""Every way to draft, side by side, on one target.

    python train/pretrain.py --config configs/stdlib.py
    python train/distill.py --config configs/stdlib.py
    python train/distill.py --config configs/heads.py --draft=medusa
    python train/distill.py --config configs/heads.py --draft=blockwise \
        --config.draft.drafter=blockwise
    python train/distill.py --config configs/eagle.py --draft=eagle
    python train/distill.py --config configs/early_exit.py --draft=exit \
        --config.distill.steps=240 --config.distill.warmup=24
    python eval/drafters.py --config configs/drafters.py

Target and run are those of configs/stdlib.py: what `make demo` trained is used.
All drafts learn from the same batches of the same corpus, in as many steps with
the same loss, each at the rate of its own page. A chain of K tokens stands
beside a tree of K nodes of the same draft. Other arms are given as
`--arms=model:kl1@4,candidates:medusa@16/4`; what is missing is refused, with
the command that trains it.

`configs/drafters.py:tiny` shrinks it to seconds, to see that all runs.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))
AS_LONG = '--config.distill.steps=240 --config.distill.warmup=24'


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  contest = config.drafters
  # By folder, the page and flags that train a draft which is missing.
  contest.pages = config_dict.ConfigDict()
  suffix = f':{variant}' if variant else ''
  contest.pages.draft = f'configs/stdlib.py{suffix}'
  contest.pages.medusa = heads = f'configs/heads.py{suffix}'
  contest.pages.blockwise = f'{heads} --config.draft.drafter=blockwise'
  contest.pages.eagle = f'configs/eagle.py{suffix}'
  contest.pages.exit = f'configs/early_exit.py{suffix} {AS_LONG}'
  if variant != 'tiny':
    config.decode.k = 4  # as many as there are heads
    contest.arms = (
      'ngram',
      'suffix',
      'model:draft',
      'distinct:draft@2x1',  # as many nodes as the chain
      'mixture:draft',
      'model:medusa',
      'candidates:medusa',  # the best tree of as many nodes as the chain
      'model:blockwise',
      'model:eagle',
      'candidates:eagle',
      'model:eagle@8',
      'candidates:eagle@8',
      'early_exit:1',
      'early_exit:2',
      'model:exit',
    )
  return config
