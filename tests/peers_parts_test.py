"""The parts of a comparison with others, without the others."""

import importlib.machinery
import json
import sys
import types

import pytest
import scripts
import toys

from specjax import contest, peers
from specjax.comparison import OURS, PLAIN, Arm, Condition, Text
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.peers import inputs, llama_cpp, memory, own

DRAWN = Condition('float32', 0, 1, 1.0, 1.0)
GREEDY = DRAWN._replace(temperature=0.0)
NGRAM, MODEL = (contest.parse(text, 2) for text in ('ngram@2', 'model:draft@2'))


class Decoder:
  """Has some ways."""

  def __init__(self, *has):
    self.has = has

  def arm(self, way, condition):
    return (lambda: (way, condition)) if way in self.has else None

  def versions(self):
    return {}


def test_a_peer_enters_in_the_ways_that_it_has():
  decoders = {OURS: Decoder(None, NGRAM, MODEL), 'theirs': Decoder(None, MODEL)}
  arms = peers.enter(decoders, [NGRAM, MODEL], DRAWN)
  assert [*arms] == [
    Arm(OURS, PLAIN),
    Arm('theirs', PLAIN),
    Arm(OURS, 'ngram@2'),
    Arm(OURS, 'model:draft@2'),
    Arm('theirs', 'model:draft@2'),
  ]
  assert arms[Arm('theirs', PLAIN)]() == (None, DRAWN)
  assert arms[Arm('theirs', 'model:draft@2')]() == (MODEL, DRAWN)


def peer(needs=(), error=None):
  """A module like those of the others."""

  def export(folder, ours, tokenizer):
    if error:
      raise ValueError(error)
    return {MODEL: folder / 'draft'}

  return types.SimpleNamespace(
    NEEDS=needs,
    place=lambda folder: folder / 'target',
    export=export,
    Decoder=lambda *given: given,
  )


def test_who_is_not_installed_or_takes_no_such_model_is_left_out(
  tmp_path, monkeypatch
):
  others = {
    'absent': peer(['numpy', 'no_such_package', 'nor_such']),
    'picky': peer(error='not with biases'),
    'there': peer(['numpy']),
  }
  monkeypatch.setattr(peers, 'OTHERS', others)
  ours = own.Decoder(toys.transformer(), {})
  found, left_out = peers.find(tmp_path, ours, None, 3, 99)
  assert left_out == {
    'absent': "no_such_package, nor_such not installed: pip install '.[peers]'",
    'picky': 'not with biases',
  }
  assert [*found] == [OURS, 'there'] and found[OURS] is ours
  target, draft = tmp_path / 'target', tmp_path / 'draft'
  assert found['there'] == (target, 'float32', 3, 99, {MODEL: draft})


@pytest.mark.slow
def test_ours_is_what_decoding_gives_in_every_way():
  target, draft = toys.transformer(), toys.transformer(1)
  ways = {NGRAM: NGram(2), MODEL: ModelDrafter(draft, 2)}
  ours = own.Decoder(target, {0.0: ways})
  assert [*ours.drafts] == [MODEL] and ours.drafts[MODEL] is draft
  prompt, count = [1, 2, 3, 4], 6
  for way in (None, NGRAM, MODEL):
    text = ours.arm(way, GREEDY)([prompt], 0, count, 64)
    assert text.tokens == [toys.greedy(target, prompt, count)]
    # The prompt's pass gives a token too.
    assert text.passes == count if way is None else text.passes <= count


class Llama:
  """A llama.cpp that answers with what it was asked for, and its seed."""

  def __init__(self, path, *, draft_model, logits_all, **sizes):
    self.path, self.sizes = path, sizes
    self.draft, self.logits_all = draft_model, logits_all

  def reset(self):
    self.told = []

  def set_seed(self, seed):
    self.seed = seed

  def eval(self, tokens):
    self.told += tokens

  def generate(self, prompt, **sampling):
    self.sampling = sampling
    while True:
      self.eval(prompt)
      yield self.seed
      prompt = [self.seed]


@pytest.fixture
def bindings(monkeypatch):
  """Those of llama.cpp, of which nothing is compiled."""
  module = types.ModuleType('llama_cpp')
  module.Llama, module.GGML_TYPE_F32, module.__version__ = Llama, 0, '1.2'
  module.llama_print_system_info = lambda: b'AVX = 1 |  FMA = 1'
  inner = types.ModuleType('llama_cpp.llama_speculative')
  inner.LlamaPromptLookupDecoding = lambda size, k: (size, k)
  for one in (module, inner):
    one.__spec__ = importlib.machinery.ModuleSpec(one.__name__, None)
    monkeypatch.setitem(sys.modules, one.__name__, one)


def test_llama_cpp_forgets_the_prompt_and_counts_its_passes(tmp_path, bindings):
  decoder = llama_cpp.Decoder(tmp_path, 'float32', 3, 257)
  call = decoder.arm(None, DRAWN._replace(temperature=0.5))
  for seed in (7, 8):
    assert call([[1, 2]], seed, 4, 0) == Text([[seed] * 4], 4)
    (model,) = call.args[:1]
    assert model.told == [1, 2] + [seed] * 3
  assert model.sampling == {'temp': 0.5, 'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}
  assert model.path == str(tmp_path)
  assert model.sizes['n_ctx'] == 512 and model.sizes['n_threads'] == 3
  assert model.sizes['type_k'] == model.sizes['type_v'] == 0
  assert model.draft is None and not model.logits_all
  assert decoder.versions() == {
    'llama-cpp-python': '1.2',
    'llama.cpp': 'AVX = 1 | FMA = 1',
  }


def test_llama_cpp_has_lookup_for_one_prompt_under_a_law_like_ours(
  tmp_path, bindings
):
  decoder = llama_cpp.Decoder(tmp_path, 'bfloat16', 1, 64)
  (model,) = decoder.arm(NGRAM, DRAWN).args[:1]
  assert model.draft == (NGram(2).n, 2) and model.logits_all
  assert model.sizes['type_k'] is None
  assert decoder.arm(NGRAM, GREEDY).args[0] is model  # it is loaded once
  assert decoder.arm(MODEL, DRAWN) is None
  assert decoder.arm(None, DRAWN._replace(batch=2)) is None
  assert decoder.arm(None, DRAWN._replace(top_p=0.9)) is not None
  # It cuts before it divides: at another temperature that is another law.
  assert decoder.arm(None, GREEDY._replace(top_p=0.9)) is None


SIZES = {
  'contexts': (),
  'batches': (1,),
  'dtypes': ['float32'],
  'count': 8,
  'repeats': 3,
  'new': 32,
  'top_p': 1.0,
}


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'count': 0}, '--count is 0: at least 1'),
    ({'repeats': 0}, '--repeats is 0: at least 1'),
    ({'new': 15}, 'is 15: at least 16, since the first is timed alone'),
    ({'top_p': 0.0}, '--top_p is 0.0: above 0, and 1 at most'),
    ({'dtypes': ['int8']}, "--dtypes has 'int8': use float32 or bfloat16"),
    ({'batches': (1, 2)}, 'prompts of one batch must be as long'),
    (
      {'batches': (3,), 'contexts': (80,)},
      '--count is 8, which is no multiple of a batch of 3',
    ),
    ({'contexts': (64, 32)}, '--contexts has 32, and 32 of it are new tokens'),
  ],
)
def test_sizes_that_make_no_sense_are_refused(changes, said):
  inputs.check(**SIZES)
  with pytest.raises(ValueError) as error:
    inputs.check(**{**SIZES, **changes})
  assert said in str(error.value)


def run(folder, **decoding):
  """As much of a run as prompts are taken from."""
  return types.SimpleNamespace(
    folder=folder,
    config={'decode': {'prompt_length': 5, **decoding}},
    corpus=types.SimpleNamespace(name='text'),
    tokenizer=types.SimpleNamespace(
      template=None, start=[0], encode=lambda text: [*text.encode()]
    ),
    prompts=lambda *given: given,
  )


def test_prompts_are_of_tasks_or_cut_from_all_of_a_file(tmp_path):
  path = tmp_path / 'question.jsonl'
  lines = [{'task': task, 'text': text} for task, text in ('aA', 'bB', 'aC')]
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  workspace, name = run(tmp_path, max_new_tokens=32), str(path)
  a, b, c = ([0, ord(text)] for text in 'ABC')
  found = inputs.read_prompts(workspace, name, 2, 0)
  assert found == {'a': [a, c], 'b': [b]}
  assert inputs.read_prompts(workspace, name, 1, 0) == {'a': [a], 'b': [b]}
  # Contexts of 35 tokens leave 3 for a prompt.
  found = inputs.read_prompts(workspace, name, 2, 35)
  text = [*a, *c, *b]
  assert found == {'all tasks': [text[:3], text[3:]]}
  with pytest.raises(ValueError, match='has 6 tokens, too few for 3 prompts'):
    inputs.read_prompts(workspace, name, 3, 35)


def test_without_a_file_prompts_begin_documents(tmp_path):
  workspace = run(tmp_path, max_new_tokens=32)
  found = inputs.read_prompts(workspace, None, 4, 0)
  assert found == {'all tasks': ('test', 4, 5)}
  found = inputs.read_prompts(workspace, None, 4, 40)
  assert found == {'all tasks': ('test', 4, 8)}
  workspace.corpus.name = 'none'
  with pytest.raises(ValueError, match='has no text to take prompts from'):
    inputs.read_prompts(workspace, None, 4, 0)


@pytest.mark.slow
def test_nothing_that_only_a_peer_needs_is_imported():
  needed = {'torch', 'transformers', 'llama_cpp', 'gguf', 'safetensors'}
  scripts.execute('import specjax.peers.memory', needed)


@pytest.mark.slow
def test_a_process_that_fails_is_an_error_with_its_last_line(tmp_path):
  with pytest.raises(RuntimeError) as error:
    memory.measure(OURS, tmp_path, 'float32', [1, 2], 4, 1)
  assert 'specjax by itself: FileNotFoundError: there is no' in str(error.value)


@pytest.mark.slow
def test_the_help_is_of_what_people_may_give():
  code, out, _ = scripts.run('eval/peers.py', '--help')
  assert code == 0
  assert '--contexts' in out and '--alone' not in out
