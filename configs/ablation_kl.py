"""Acceptance, block efficiency, KL and speed against the KL weight.

    python train/pretrain.py --config configs/ablation_kl.py   # if not done yet
    python eval/ablation.py --config configs/ablation_kl.py

Target and drafts are those of configs/stdlib.py, and so is the run: what
`make demo` trained is used, its drafts of seed 0 too. Eighteen drafts of 0.7 M
parameters train together on the corpus, and eighteen more on text that the
target wrote, where cross entropy is forward KL in expectation: some minutes
each on two CPU cores, and timing them takes as long again. To try more than
this, name an axis:

    --axis=draft.model.width=64,128 --axis=decode.k=1,2,4,8

`configs/ablation_kl.py:tiny` shrinks it to seconds, to see that all runs.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)

  ablation = config.ablation
  ablation.seeds = 3  # the fewest with an interval worth the name
  ablation.timed_prompts = 4  # decoded alone, in turns with plain decoding
  axes = ablation.axes
  axes.loss.divergence = ('forward_kl',)  # others: the names of losses.py
  axes.decode = config_dict.ConfigDict()
  axes.decode.temperature = (1.0,)  # another is another line, not a training

  axes.data = (
    {'corpus': 1.0, 'target': 0.0},
    {'corpus': 0.0, 'target': 1.0},
  )

  if variant == 'tiny':
    axes.loss.kl_weight = (0.0, float('inf'))
    axes.decode.temperature = (1.0, 0.5)
    del axes.data
    ablation.seeds = ablation.timed_prompts = ablation.repeats = 2
  return config
