"""Writes folders as Hugging Face's are: for tests that need a model of others.

They are written by `huggingface.save`, which its own test holds against
`transformers`.
"""

import json

import jax
from flax import nnx

from specjax import tokenizers
from specjax.models import huggingface
from specjax.models.transformer import Transformer, TransformerConfig

SPECIAL = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
TEMPLATE = (
  '{% for message in messages %}'
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
  "{{ '<|im_end|>' + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = 'You are a helpful assistant named user, trained by all of us. ' * 20
LICENCE = 'apache-2.0'


def tokenizer(**changes):
  """A byte-level BPE with the special tokens of a chat."""
  model, _ = tokenizers.portable(tokenizers.BPE.train([TEXT], 310))
  vocab = model['model']['vocab']
  special = [tokenizers.added(vocab[SPECIAL[0]], SPECIAL[0])]
  for token in SPECIAL[1:]:
    vocab[token] = len(vocab)
    special.append(tokenizers.added(vocab[token], token))
  model['added_tokens'] = special
  return tokenizers.Pretrained(
    json.dumps(model),
    **{
      'end': [SPECIAL[2], SPECIAL[0]],
      'template': TEMPLATE,
      'names': {'eos_token': SPECIAL[2]},
      **changes,
    },
  )


def model(folder, padding=0, seed=0, **changes):
  """A random model with its tokenizer, card and padding; returns it."""
  own = tokenizer()
  config = TransformerConfig(
    **{
      'vocab_size': own.vocab_size,
      'width': 24,
      'layers': 2,
      'heads': 3,
      'kv_heads': 3,
      'hidden': 32,
      'norm_eps': 1e-5,
      **changes,
    }
  )
  # Large weights, so that no two logits are near one another.
  made = jax.tree.map(
    lambda x: x * 8 if x.ndim > 1 else x, Transformer(config, nnx.Rngs(seed))
  )
  huggingface.save(made, folder, own, own.vocab_size + padding)
  card = f'---\nlicense: {LICENCE}\n---\n# A model\n'
  (folder / 'README.md').write_text(card)
  return made
