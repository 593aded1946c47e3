"""Models of others as targets and drafts, and drafts for others."""

import json

import hf_files
import jax
import numpy as np
import pytest
import scripts

import specjax
from specjax import checkpoint, experiment, tokenizers
from specjax.drafters.model import ModelDrafter
from specjax.models import card, huggingface, pretrained
from specjax.workspace import Workspace

pytest.importorskip('safetensors', reason='no safetensors')

SHAKEN = 0.1  # a draft that is often right and often not


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
  before = pretrained.Source(str(tmp_path / 'model')).hash
  settings = tmp_path / 'model' / 'tokenizer_config.json'
  settings.write_text(settings.read_text() + ' ')
  assert pretrained.Source(str(tmp_path / 'model')).hash != before


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
  with pytest.raises(ValueError, match='draft.path is .*: id 4[01] is '):
    Workspace.create(tmp_path / 'run', page(tmp_path / 'model', path=path))
  # And where the target was there before.
  adopted(tmp_path / 'run', page(tmp_path / 'model'))
  run = Workspace.create(tmp_path / 'run', page(tmp_path / 'model', path=path))
  with pytest.raises(ValueError, match='draft.path is .*: id 4[01] is '):
    run.new_drafter(0)


def test_documents_begin_and_end_as_is_said(tmp_path):
  hf_files.model(tmp_path / 'model')
  start = '<|im_start|>user\n'
  source = pretrained.Source(str(tmp_path / 'model'))
  own = source.load_tokenizer('', start, '<|endoftext|>')
  ids = own.encode_special(start)
  assert own.start == ids and len(ids) < len(start) / 2
  assert own.decode([own.eos_id]) == ''
  assert own.end_ids == [own.eos_id]
  plain = source.load_tokenizer()
  assert plain.start == [] and len(plain.end_ids) == 2
  # A text that quotes a special token is text.
  assert plain.eos_id not in plain.encode('<|im_end|>')
  assert plain.decode(plain.encode('<|im_end|> é\n')) == '<|im_end|> é\n'
  with pytest.raises(ValueError, match='no end token <eos>'):
    source.load_tokenizer('', '', '<eos>')


def test_a_chat_is_written_as_the_template_says():
  own = hf_files.tokenizer()
  chat = own.chat([{'role': 'user', 'content': '<|im_start|>? {{ 1 }}'}])
  wanted = '<|im_start|>user\n<|im_start|>? {{ 1 }}<|im_end|>\n'
  assert chat == own.encode_special(wanted + '<|im_start|>assistant\n')
  refusing = hf_files.tokenizer(template="{{ raise_exception('no system') }}")
  with pytest.raises(ValueError, match='the chat template refuses: no system'):
    refusing.chat([{'role': 'user', 'content': 'x'}])
  broken = hf_files.tokenizer(template='{% if %}')
  with pytest.raises(ValueError, match='the chat template fails: Templ'):
    broken.chat([{'role': 'user', 'content': 'x'}])
  with pytest.raises(ValueError, match='no chat template'):
    hf_files.tokenizer(template=None).chat([])
  # It cannot reach out of its sandbox.
  sly = "{{ ''.__class__.__mro__ }}"
  with pytest.raises(ValueError, match='the chat template'):
    hf_files.tokenizer(template=sly).chat([{'role': 'user', 'content': 'x'}])


def test_a_model_that_cannot_be_loaded_leaves_room_for_another(tmp_path):
  hf_files.model(tmp_path / 'broken')
  weights = tmp_path / 'broken' / 'model.safetensors'
  weights.write_bytes(weights.read_bytes()[:-1])
  folder = tmp_path / 'run'
  with pytest.raises(ValueError, match='is not whole'):
    adopted(folder, page(tmp_path / 'broken'))
  hf_files.model(tmp_path / 'model')
  spelt = tmp_path / 'model' / 'tokenizer_config.json'
  settings = json.loads(spelt.read_text())
  spelt.write_text(json.dumps({**settings, 'eos_token': '<|endoftext|>'}))
  run = adopted(folder, page(tmp_path / 'model'))
  assert run.tokenizer.pieces[run.tokenizer.eos_id] == b''
  assert run.tokenizer.eos_id != hf_files.tokenizer().eos_id


def test_without_text_a_prompt_is_what_begins_one(tmp_path):
  hf_files.model(tmp_path / 'model')
  config = page(tmp_path / 'model')
  config['corpus']['name'] = 'none'
  config['data'] |= {'corpus': 0.0, 'target': 1.0}
  with pytest.raises(ValueError, match='nothing begins a text of this model'):
    adopted(tmp_path / 'run', config)
  start = '<|im_start|>user\nIs there another way?'
  config['target']['document_start'] = start
  count = len(hf_files.tokenizer().encode_special(start))
  with pytest.raises(ValueError, match=f'data.prompt_length is 4.*{count} tok'):
    adopted(tmp_path / 'run', config)
  for section in ('data', 'validation', 'decode'):
    config[section]['prompt_length'] = count
  run = adopted(tmp_path / 'run', config)
  assert run.prompts('test', 2, count) == [run.tokenizer.start] * 2


def test_layers_are_given_on_a_command_line():
  config = experiment.load(scripts.ROOT / 'configs' / 'pretrained.py')
  wanted = ['--config.target.path=x', '--config.draft.target_layers=0,2']
  experiment.override(config, wanted)
  assert config.draft.target_layers == (0, 2)


def test_an_export_replaces_nothing_but_an_export(tmp_path):
  model = hf_files.model(tmp_path / 'model')
  assert huggingface.is_ours(tmp_path / 'model')
  file = tmp_path / 'model' / 'config.json'
  config = json.loads(file.read_text())
  del config['exported_by']
  file.write_text(json.dumps(config))
  assert not huggingface.is_ours(tmp_path / 'model')
  assert not huggingface.is_ours(tmp_path)
  del model


@pytest.mark.parametrize(
  'name, known',
  [
    ('owner/model', True),
    ('owner/model@refs/pr/1', True),
    ('./owner/model', False),
    ('../model', False),
    ('owner/model.gguf', False),
    ('stories260K/stories260K.bin', False),
    ('model', False),
    ('a/b/c', False),
  ],
)
def test_names_on_the_hub(name, known):
  assert huggingface.is_hub_name(name) == known


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
    pretrained.Source(str(tmp_path / 'nowhere'))
  (tmp_path / 'empty').mkdir()
  with pytest.raises(FileNotFoundError, match='config.json'):
    pretrained.Source(str(tmp_path / 'empty')).load()
  (tmp_path / 'text.gguf').write_text('no GGUF at all')
  with pytest.raises(ValueError, match='text.gguf is no GGUF'):
    pretrained.Source(str(tmp_path / 'text.gguf')).load()


@pytest.mark.parametrize(
  ('name', 'start', 'said'),
  [
    ('model.safetensors', b'', 'is the weights alone: name the folder, '),
    ('pytorch_model.bin', b'PK\x03\x04', 'is pickled'),
    ('old.bin', b'\x80\x02', 'is pickled'),
    ('blob', b'GGUF\x03', 'is a GGUF: give it a name that ends in .gguf'),
    ('x.gguf', b'version https://git-lfs.github.com/spec/v1', 'git lfs pull'),
  ],
)
def test_files_are_not_taken_for_others(name, start, said, tmp_path):
  (tmp_path / name).write_bytes(start + bytes(100))
  with pytest.raises(ValueError, match=said):
    pretrained.Source(str(tmp_path / name))


def test_what_can_be_seen_to_be_wrong_is_refused_before_there_is_a_run(
  tmp_path,
):
  folder, model = tmp_path / 'run', tmp_path / 'model'
  hf_files.model(model)
  kept = json.loads((model / 'config.json').read_text())
  other = kept | {'architectures': ['GPT2LMHeadModel']}
  (model / 'config.json').write_text(json.dumps(other))
  with pytest.raises(ValueError, match='architecture GPT2LMHeadModel'):
    Workspace.create(folder, page(model))
  (model / 'config.json').write_text(json.dumps(kept))
  hf_files.model(tmp_path / 'other', seed=1)
  for wrong, said in (
    ({'target_layers': (0, 7)}, 'target_layers is .*: the target has 2 layers'),
    ({'path': str(tmp_path / 'nowhere')}, 'there is no model .*nowhere'),
  ):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
      Workspace.create(folder, page(model, **wrong))
  config = page(model)
  config['target']['dtype'] = 'float16'
  with pytest.raises(ValueError, match="target.dtype is 'float16'"):
    Workspace.create(folder, config)
  assert not folder.exists()


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
  assert code == 0, error
  (exported / 'config.json').write_text('{}')
  code, _, error = scripts.run('train/export.py', f'--workdir={folder}')
  assert code == 2 and 'holds something else' in error

  prompts = tmp_path / 'question.jsonl'
  lines = [
    {
      'question_id': 81 + i,
      'category': task,
      'turns': [f'Say {i} to {task}', 'again'],
    }
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
    '--config.decode.draft_length=adaptive',
  )
  assert code == 0, error
  assert 'greedy text is identical' in out and 'mt_bench' in out
  assert '; lengths: adaptive' in out
  rows = json.loads((folder / 'tasks.json').read_text())['rows']
  assert {row['task'] for row in rows} == {'mt_bench', 'qa', 'all tasks'}
  assert all(
    row['prompts'] == (4 if row['task'] == 'all tasks' else 2) for row in rows
  )
  assert (folder / 'tasks.png').exists()


@pytest.mark.slow
def test_transformers_takes_an_export_as_its_assistant(tmp_path):
  transformers = pytest.importorskip('transformers', reason='no transformers')
  torch = pytest.importorskip('torch', reason='no torch')
  own = hf_files.tokenizer()
  # Untied, or a random model says one token over and over.
  target = hf_files.model(tmp_path / 'model', tied=False, layers=3)

  def shaken(path, x):
    key = jax.random.fold_in(jax.random.key(1), len(str(path)))
    return x * (1 + SHAKEN * jax.random.normal(key, x.shape))

  draft = specjax.ModelDrafter(
    jax.tree_util.tree_map_with_path(shaken, target), 4, specjax.Greedy()
  )
  for model, name in ((target, 'target'), (draft.model, 'draft')):
    huggingface.save(model, tmp_path / name, own, own.vocab_size + 5)
  theirs, assistant = (
    transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / name, dtype=torch.float64
    )
    for name in ('target', 'draft')
  )
  spelt = transformers.AutoTokenizer.from_pretrained(tmp_path / 'target')
  messages = [{'role': 'user', 'content': 'You are a helpful user, é\n all'}]
  ids = spelt.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=False
  )
  assert ids == own.chat(messages)
  assert spelt.decode(ids[4:8]) == own.decode(ids[4:8])
  passes, forward = [], theirs.forward

  def counted(*args, **kwargs):
    passes.append(kwargs['input_ids'].shape[1])
    return forward(*args, **kwargs)

  theirs.forward = counted
  settings = assistant.generation_config
  settings.num_assistant_tokens = 4
  settings.num_assistant_tokens_schedule = 'constant'
  settings.assistant_confidence_threshold = 0.0
  prompt, new = torch.tensor([ids]), 48
  text = theirs.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=new,
    do_sample=False,
    eos_token_id=None,
    assistant_model=assistant,
  )
  result = specjax.generate(
    target,
    draft,
    [ids],
    key=jax.random.key(0),
    max_new_tokens=new,
    warp=specjax.Greedy(),
  )
  assert text[0, len(ids) :].tolist() == result.new_tokens()[0]
  # Both accept as much of the same drafts; the last may be cut.
  rounds = int(result.stats.rounds.sum())
  assert 0.2 * new < rounds < 0.9 * new
  assert abs(len(passes) - rounds) <= 1
