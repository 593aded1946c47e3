"""Models of others as targets and drafts, and drafts for others."""

import json

import hf_files
import jax
import numpy as np
import pytest
import scripts

from specjax import checkpoint, experiment, tokenizers
from specjax.drafters.model import ModelDrafter
from specjax.models import card, huggingface, pretrained
from specjax.workspace import Workspace

pytest.importorskip('safetensors', reason='no safetensors')


def page(target, /, **draft):
  config = experiment.load(scripts.ROOT / 'configs' / 'pretrained.py:tiny')
  config.target.path = str(target)
  config = config.to_dict()
  config['draft'] |= draft
  return config


def adopted(folder, config):
  run = Workspace.create(folder, config)
  run.adopt_target()
  return run


def equal(one, other):
  leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.array_equal(a, b) for a, b in leaves)


def test_a_folder_becomes_the_target_of_a_run(tmp_path):
  model = hf_files.model(tmp_path / 'model', padding=7)
  run = adopted(tmp_path / 'run', page(tmp_path / 'model'))
  assert equal(run.target(), model)  # the padding is gone
  tokenizer = run.tokenizer
  assert isinstance(tokenizer, tokenizers.Pretrained)
  assert tokenizer.vocab_size == model.config.vocab_size
  record = checkpoint.Checkpoints(run.folder / 'target').meta(0)
  assert record['licence'] == hf_files.LICENCE
  assert record['vocab_size'] == tokenizer.vocab_size + 7
  # What the run has serves without the folder.
  (tmp_path / 'model' / 'config.json').rename(tmp_path / 'gone')
  seen = Workspace.look_at(run.folder, run.config)
  assert equal(seen.target(), model)
  assert seen.tokenizer.hash == tokenizer.hash


def test_a_changed_tokenizer_is_another_model(tmp_path):
  hf_files.model(tmp_path / 'model')
  before = pretrained.content_hash(tmp_path / 'model')
  settings = tmp_path / 'model' / 'tokenizer_config.json'
  settings.write_text(settings.read_text() + ' ')
  assert pretrained.content_hash(tmp_path / 'model') != before


def test_a_draft_begins_as_layers_of_the_target_or_as_another_model(tmp_path):
  model = hf_files.model(tmp_path / 'model', layers=3, rope_theta=5e4)
  small = hf_files.model(tmp_path / 'small', width=12, layers=1, seed=1)
  path, folder = tmp_path / 'model', tmp_path / 'run'
  run = adopted(folder, page(path, target_layers=(2, 0)))
  drafter = run.new_drafter(0)
  assert isinstance(drafter, ModelDrafter)
  assert equal(drafter.model, model.subset([2, 0]))
  run = Workspace.create(folder, page(path, path=str(tmp_path / 'small')))
  assert equal(run.new_drafter(0).model, small)
  both = page(path, path=str(tmp_path / 'small'), target_layers=(0,))
  with pytest.raises(ValueError, match='draft.path and draft.target_layers'):
    Workspace.create(folder, both)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
  hf_files.model(tmp_path / 'model')
  hf_files.model(tmp_path / 'other', seed=1)
  file = tmp_path / 'other' / 'tokenizer.json'
  spelt = json.loads(file.read_text())
  vocab = spelt['model']['vocab']
  first, second = (t for t, i in vocab.items() if i in (40, 41))
  vocab[first], vocab[second] = vocab[second], vocab[first]
  file.write_text(json.dumps(spelt))
  path = str(tmp_path / 'other')
  run = adopted(tmp_path / 'run', page(tmp_path / 'model', path=path))
  with pytest.raises(ValueError, match='draft.path is .*: id 4[01] is '):
    run.new_drafter(0)


def test_documents_begin_and_end_as_is_said(tmp_path):
  hf_files.model(tmp_path / 'model')
  start = '<|im_start|>user\n'
  own = pretrained.load_tokenizer(
    str(tmp_path / 'model'), '', start, '<|endoftext|>'
  )
  ids = own.encode_special(start)
  assert own.start == ids and len(ids) < len(start) / 2
  assert own.decode([own.eos_id]) == ''
  assert own.end_ids == [own.eos_id]
  plain = pretrained.load_tokenizer(str(tmp_path / 'model'))
  assert plain.start == [] and len(plain.end_ids) == 2
  # A text that quotes a special token is text.
  assert plain.eos_id not in plain.encode('<|im_end|>')
  assert plain.decode(plain.encode('<|im_end|> é\n')) == '<|im_end|> é\n'
  with pytest.raises(ValueError, match='no end token <eos>'):
    pretrained.load_tokenizer(str(tmp_path / 'model'), '', '', '<eos>')


def test_a_chat_is_written_as_the_template_says():
  own = hf_files.tokenizer()
  chat = own.chat([{'role': 'user', 'content': '<|im_start|>? {{ 1 }}'}])
  wanted = '<|im_start|>user\n<|im_start|>? {{ 1 }}<|im_end|>\n'
  assert chat == own.encode_special(wanted + '<|im_start|>assistant\n')
  refusing = hf_files.tokenizer(template="{{ raise_exception('no system') }}")
  with pytest.raises(ValueError, match='the chat template refuses: no system'):
    refusing.chat([{'role': 'user', 'content': 'x'}])
  broken = hf_files.tokenizer(template='{% if %}')
  with pytest.raises(ValueError, match='the chat template is no Jinja'):
    broken.chat([{'role': 'user', 'content': 'x'}])
  with pytest.raises(ValueError, match='no chat template'):
    hf_files.tokenizer(template=None).chat([])
  # It cannot reach out of its sandbox.
  sly = "{{ ''.__class__.__mro__ }}"
  with pytest.raises(ValueError, match='the chat template'):
    hf_files.tokenizer(template=sly).chat([{'role': 'user', 'content': 'x'}])


@pytest.mark.parametrize(
  'text, found',
  [
    ('---\nlicense: mit\n---\n', 'mit'),
    ("---\nx: 1\nlicense: 'llama3'\n---\n", 'llama3'),
    ('license: mit\n', card.UNKNOWN),
    ('---\nlicense_name: x\n---\nlicense: mit', card.UNKNOWN),
  ],
)
def test_licences_of_cards(text, found):
  assert card.licence(text) == found


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
  with pytest.raises(FileNotFoundError, match='there is no model .*nowhere'):
    pretrained.local(str(tmp_path / 'nowhere'))
  (tmp_path / 'empty').mkdir()
  with pytest.raises(FileNotFoundError, match='config.json'):
    pretrained.load(str(tmp_path / 'empty'))
  (tmp_path / 'text.gguf').write_text('no GGUF at all')
  with pytest.raises(ValueError, match='text.gguf is no GGUF'):
    pretrained.load(str(tmp_path / 'text.gguf'))


@pytest.mark.slow
def test_from_a_model_of_others_to_a_draft_for_others(tmp_path):
  hf_files.model(tmp_path / 'model', padding=5)
  folder = tmp_path / 'run'
  code, out, error = scripts.run(
    'train/distill.py',
    '--config=configs/pretrained.py:tiny',
    f'--config.target.path={tmp_path / "model"}',
    f'--workdir={folder}',
  )
  assert code == 0, error
  code, out, error = scripts.run('train/export.py', f'--workdir={folder}')
  assert code == 0, error
  exported = folder / 'exported' / 'draft'
  draft = (
    Workspace.look_at(folder, json.loads((folder / 'config.json').read_text()))
    .drafter('draft')
    .model
  )
  size = draft.config.vocab_size
  assert huggingface.read_config(exported).vocab_size == size + 5
  assert equal(huggingface.load(exported, vocab_size=size), draft)
  text = (exported / 'README.md').read_text()
  assert f'license: {hf_files.LICENCE}' in text and 'acceptance rate' in text
  # A draft of its own target's vocabulary, whatever the file.
  again = huggingface.load_tokenizer(exported)
  tokenizers.require_same(again, hf_files.tokenizer())
  code, _, error = scripts.run('train/export.py', f'--workdir={folder}')
  assert code == 0, error  # it may be written again
  (exported / 'model.safetensors').unlink()
  code, _, error = scripts.run('train/export.py', f'--workdir={folder}')
  assert code == 2 and 'has another config.json' in error

  prompts = tmp_path / 'question.jsonl'
  lines = [
    {'category': task, 'turns': [f'Say {i} to {task}', 'again']}
    for task in ('writing', 'stem', 'qa')
    for i in range(3)
  ]
  prompts.write_text('\n'.join(map(json.dumps, lines)))
  code, out, error = scripts.run(
    'eval/speedup.py',
    f'--workdir={folder}',
    f'--prompts={prompts}',
    '--arms=ngram,model:draft@2',
    '--count=2',
  )
  assert code == 0, error
  assert 'greedy text is identical' in out and 'mt_bench' in out
  rows = json.loads((folder / 'tasks.json').read_text())['rows']
  assert {row['task'] for row in rows} == {'mt_bench', 'qa', 'all'}
  assert all(
    row['prompts'] == (4 if row['task'] == 'all' else 2) for row in rows
  )
  assert (folder / 'tasks.png').exists()


@pytest.mark.slow
def test_transformers_takes_an_export_as_its_assistant(tmp_path):
  transformers = pytest.importorskip('transformers', reason='no transformers')
  torch = pytest.importorskip('torch', reason='no torch')
  model = hf_files.model(tmp_path / 'model', padding=5, layers=3)
  hf_files.model(tmp_path / 'draft', padding=5, width=12, layers=1, seed=1)
  load = transformers.AutoModelForCausalLM.from_pretrained
  target, draft = load(tmp_path / 'model'), load(tmp_path / 'draft')
  spelt = transformers.AutoTokenizer.from_pretrained(tmp_path / 'model')
  own = hf_files.tokenizer()
  messages = [{'role': 'user', 'content': 'You are a helpful user, é\n all'}]
  ids = spelt.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=False
  )
  assert ids == own.chat(messages)
  assert spelt.decode(ids[4:8]) == own.decode(ids[4:8])
  prompt = torch.tensor([ids])
  plain, assisted = (
    target.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      max_new_tokens=24,
      do_sample=False,
      eos_token_id=None,
      **more,
    )
    for more in ({}, {'assistant_model': draft})
  )
  assert plain.tolist() == assisted.tolist()
  del model
