"""Any model that was trained elsewhere as the target.

    python eval/speedup.py --target=HuggingFaceTB/SmolLM2-135M-Instruct \
        --prompts=question.jsonl
    python train/distill.py --config configs/pretrained.py \
        --config.target.path=HuggingFaceTB/SmolLM2-135M-Instruct \
        --config.corpus.name='files:texts/*.txt'

The path is a folder of Hugging Face or a name on its hub, a GGUF, or a
checkpoint of llama2.c. The draft is trained on the corpus; without one, on what
the target writes: configs/smollm2.py shows how. It may begin as some of the
target's layers, `config.draft.target_layers`, or as another model of the same
vocabulary, `config.draft.path`.
"""

import pathlib
import runpy

from ml_collections import config_dict

STDLIB = runpy.run_path(str(pathlib.Path(__file__).with_name('stdlib.py')))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = STDLIB['get_config'](variant)
  tiny = variant == 'tiny'
  config.workdir = 'runs/pretrained-tiny' if tiny else 'runs/pretrained'

  config.target = target = config_dict.ConfigDict()
  target.path = config_dict.placeholder(str)
  target.tokenizer_path = ''  # in the folder or the file, or beside it
  target.document_start = ''  # before each document; empty: as its files say
  target.document_end = ''  # the token behind it; likewise
  target.dtype = 'float32'
  del config.pretrain

  config.draft.target_layers = ()  # of the target, that the draft begins as
  return config
