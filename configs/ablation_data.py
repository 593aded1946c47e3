"""Acceptance against what a draft learns from: corpus, target, or itself.

    python train/pretrain.py --config configs/ablation_data.py
    python eval/ablation.py --config configs/ablation_data.py

Target and drafts are those of configs/stdlib.py, and so is the run. Every draft
minimises the divergence alone, on one of four mixes of text, with equally many
steps and equally many texts. A draft that learns on its own text trains alone,
so this takes longer than configs/ablation_kl.py.

`configs/ablation_data.py:tiny` shrinks it to seconds, to see that all runs.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  ablation = config.ablation
  ablation.seeds = 2 if variant == 'tiny' else 3
  axes = ablation.axes
  axes.loss.kl_weight = (float('inf'),)
  axes.data = (
    {'corpus': 1.0, 'target': 0.0, 'draft': 0.0},
    {'corpus': 0.0, 'target': 1.0, 'draft': 0.0},
    {'corpus': 0.0, 'target': 0.5, 'draft': 0.5},
    {'corpus': 0.0, 'target': 0.0, 'draft': 1.0},
  )
  return config
