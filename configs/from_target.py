"""A draft that begins as some of the target's layers.

    python train/distill.py --config configs/from_target.py --draft=from_target
    python eval/speedup.py --config configs/from_target.py --draft=from_target

Target and run are those of configs/stdlib.py. The draft is as wide as the
target, with its embedding, norm and head, and is good before its first step:
`--draft=untrained` measures that. Unlike configs/early_exit.py it has weights
and a cache of its own, and may take any layers, in any order.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  config.draft.target_layers = (0, 1) if not variant else (0,)
  if not variant:
    config.distill.learning_rate = 1e-3  # a wide model bears no higher one
  return config
