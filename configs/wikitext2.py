"""The small replication: six layers, a draft of two, WikiText-2.

    python train/distill.py --config configs/wikitext2.py \
        --config.corpus.name=files:wikitext-2/train.txt \
        --config.corpus.test=files:wikitext-2/test.txt
    python eval/losslessness.py --workdir runs/wikitext2 \
        --num_tokens=64000 --sequences=16000

The second command is the figure: speculative against plain text, and plain
against plain beside it, by a KL over tables of 64 cells less its mean where
both are of one law. The text is at huggingface.co/datasets/Salesforce/wikitext,
`wikitext-2-v1`, whose splits are tables: write the rows of each to a text file.
Its valid split alone will do to try this.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  tiny = variant == 'tiny'
  config.workdir = 'runs/wikitext2-tiny' if tiny else 'runs/wikitext2'
  config.corpus.name = config_dict.placeholder(str)
  config.corpus.test = config_dict.placeholder(str)
  if not tiny:
    target, draft = config.target, config.draft.model
    target.width, target.layers, target.hidden = 256, 6, 704
    target.heads, target.kv_heads = 4, 2
    draft.width, draft.layers, draft.hidden = 128, 2, 344
    config.pretrain.steps, config.pretrain.batch = 300, 8
    config.pretrain.warmup, config.pretrain.eval_every = 30, 100
    config.decode.k = 4
  return config
