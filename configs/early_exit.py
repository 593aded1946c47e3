"""The target's own first layers as the draft, with an adapter to train.

    python train/distill.py --config configs/early_exit.py --draft=early_exit
    python eval/speedup.py --config configs/early_exit.py --draft=early_exit

Target and run are those of configs/stdlib.py. With `--draft=untrained` the
second command measures the exit as it is, and needs no first. The draft has 0.3
M parameters of its own and takes a quarter of the steps of a draft model: an
acceptance of .74 becomes .80. A draft token costs as many of the target's
layers as it passes, and its head.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  config.draft.drafter = 'early_exit'
  config.draft.layers = 1  # of the target's six: two accept .82, untrained
  if not variant:
    config.distill.steps, config.distill.warmup = 60, 6
    config.distill.eval_every = 60
    config.distill.learning_rate = 1e-3  # 4e-3 gains no more
  return config
