"""EAGLE for a real model, SmolLM2-135M-Instruct, on what the model itself says.

    pip install '.[hf]'
    python train/distill.py --config configs/smollm2.py \
        --config.target.path=HuggingFaceTB/SmolLM2-135M-Instruct --draft=eagle
    python eval/speedup.py --workdir runs/smollm2 --prompts=question.jsonl \
        --arms=ngram,model:eagle@4

The path may be a folder too, or a GGUF. No text is needed: behind the words
that begin a chat the model writes both sides of it, as it was trained to read
them (Magpie, Xu et al. 2024, arXiv 2406.08464). Any other model with a chat
template will do, with its own words in `target.document_start`.
"""

import pathlib
import runpy

from ml_collections import config_dict

PAGE = pathlib.Path(__file__).with_name('pretrained.py')
PRETRAINED = runpy.run_path(str(PAGE))


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = PRETRAINED['get_config'](variant)
  tiny = variant == 'tiny'
  config.workdir = 'runs/smollm2-tiny' if tiny else 'runs/smollm2'

  config.corpus.name = 'none'
  target = config.target
  target.document_start = (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained'
    ' by Hugging Face<|im_end|>\n<|im_start|>user\n'
  )
  target.document_end = '<|endoftext|>'  # <|im_end|> ends each side's words

  draft = config.draft
  draft.drafter = 'eagle'
  draft.vocab_size = 300 if tiny else 8192  # of 49 152: the head is dearest
  draft.eagle = eagle = config_dict.ConfigDict()
  eagle.taps = (0, 1) if tiny else (4, 14)
  eagle.heads, eagle.kv_heads, eagle.hidden = 9, 3, 1536
  config.decode.k = 2 if tiny else 4
  eagle.unroll = config.decode.get_oneway_ref('k')

  data, distill = config.data, config.distill
  data.corpus, data.target = 0.0, 1.0
  if tiny:
    target.document_start = '<|im_start|>'
  for section in (data, config.validation, config.decode):
    section.prompt_length = 1 if tiny else 24  # tokens of document_start

  config.loss.kl_weight = float('inf')  # the text is the target's own
  if not tiny:
    data.tokens = 230  # with the 24, nearly a window
    data.refresh, data.sequences = 600, 500  # written once, read five times
    distill.steps, distill.warmup, distill.batch = 600, 50, 4
    distill.learning_rate = 1e-3
    distill.dtype = 'bfloat16'
    distill.eval_every = 100
    config.validation.sequences, config.validation.tokens = 64, 230
    config.decode.max_new_tokens = 64
  return config
