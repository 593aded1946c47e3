"""Heads on the target's features in place of a draft model.

    python train/pretrain.py --config configs/heads.py   # if not done yet
    python train/distill.py --config configs/heads.py --draft=medusa
    python eval/speedup.py --draft=medusa
    python eval/generate.py --draft=medusa --drafter=candidates --branching=3,2

Target and run are those of configs/stdlib.py: what `make demo` trained is used.
`--config.draft.drafter=blockwise --draft=blockwise` makes the other kind. A
draft is at most as long as there are heads.

`configs/heads.py:tiny` shrinks it to seconds, to see that all runs.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  count = 2 if variant == 'tiny' else 4

  draft = config.draft
  draft.drafter = 'medusa'  # or 'blockwise'; neither looks at draft.model
  draft.medusa = config_dict.ConfigDict()
  draft.medusa.heads = count  # the longest draft
  draft.medusa.layers = 1  # residual blocks of a head
  draft.blockwise = config_dict.ConfigDict()
  draft.blockwise.heads = count
  draft.blockwise.hidden = config.target.hidden

  config.distill.learning_rate = 1e-3  # as wide as the target, so as its rate

  config.decode.k = count
  speedup = config.speedup
  speedup.ks = tuple(range(1, count + 1))
  speedup.controlled_k = count
  return config
