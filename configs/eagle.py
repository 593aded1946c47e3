"""EAGLE for the target of configs/stdlib.py: a layer on the target's streams.

    python train/distill.py --config configs/eagle.py --draft=eagle
    python eval/speedup.py --config configs/eagle.py --draft=eagle

The run is that of configs/stdlib.py, and the first command trains its target if
there is none. A training step takes as many passes of the layer as a draft has
tokens.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  draft = config.draft
  draft.drafter = 'eagle'  # which does not look at draft.model
  draft.vocab_size = 0  # most frequent tokens that it drafts of; 0: all
  draft.eagle = eagle = config_dict.ConfigDict()
  layers = config.target.layers
  eagle.taps = layers // 6, layers // 2  # whose outputs it reads, from 0
  eagle.heads = config.target.heads
  eagle.kv_heads = config.target.kv_heads
  eagle.hidden = config.target.hidden // 3  # a third is as good in this time
  # Passes on its own outputs, in training: as many as a draft has tokens.
  eagle.unroll = config.decode.get_oneway_ref('k')

  config.distill.learning_rate = 1e-3  # as wide as the target, so as its rate
  return config
