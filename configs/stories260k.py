"""A draft of 53 K parameters for a real target, stories260K.

    python train/distill.py --config configs/stories260k.py \
        --config.target.path=stories260K/stories260K.bin
    python eval/speedup.py --workdir runs/stories260k
    python eval/generate.py --workdir runs/stories260k --tokens 200

The target, 260 K parameters that tell children's stories, is `stories260K.bin`
of huggingface.co/karpathy/tinyllamas, with `tok512.bin` beside it. Any other
checkpoint of llama2.c will do. No text is needed: the draft learns on what the
target writes. In nine minutes on two busy CPU cores it came to α = .52 at
temperature 1 on other text by the target (one seed).
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  tiny = variant == 'tiny'
  config.workdir = 'runs/stories260k-tiny' if tiny else 'runs/stories260k'

  config.corpus.name = 'none'
  config.target = target = config_dict.ConfigDict()
  target.path = config_dict.placeholder(str)
  target.tokenizer_path = ''  # the tok*.bin that lies beside it
  target.dtype = 'float32'
  del config.pretrain

  data, distill = config.data, config.distill
  data.corpus, data.target = 0.0, 1.0
  # A text begins with one token, and so do all that are measured.
  for section in (data, config.validation, config.decode):
    section.prompt_length = 1

  if not tiny:
    draft = config.draft.model
    draft.width, draft.layers, draft.hidden = 40, 2, 96
    draft.heads, draft.kv_heads = 4, 2

    data.tokens = 255  # with the first, a window
    data.refresh, data.sequences = 700, 384  # written once, read 15 times

    distill.steps, distill.warmup, distill.batch = 700, 40, 8
    distill.learning_rate = 6e-3
    distill.eval_every = 350
    config.loss.kl_weight = float('inf')  # the text is the target's own

    config.validation.sequences, config.validation.tokens = 64, 255
    config.decode.max_new_tokens = 255

    sizes = config.draft_sizes
    sizes.width, sizes.layers = (64, 48, 40, 24), (3, 2, 2, 1)
    sizes.heads, sizes.kv_heads = (8, 4, 4, 2), (4, 2, 2, 1)
    sizes.hidden = (172, 128, 96, 64)
    sizes.learning_rate = tuple(0.24 / width for width in sizes.width)
  return config
