"""Values that make no sense are refused before anything is written."""

import copy

import jax.numpy as jnp
import pytest
import scripts
from jax.sharding import AbstractMesh

from specjax import experiment, files, recipes, runs, settings, sharding
from specjax.checkpoint import Checkpoints
from specjax.drafters.committee import Committee
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.workspace import Workspace

PAGE = experiment.load(scripts.ROOT / 'configs' / 'stdlib.py:tiny').to_dict()


def changed(path, value):
  config = copy.deepcopy(PAGE)
  *sections, name = path.split('.')
  section = config
  for key in sections:
    section = section[key]
  assert name in section
  section[name] = value
  return config


def test_the_page_itself_is_fine():
  settings.check(PAGE)


@pytest.mark.parametrize(
  ('path', 'value', 'words'),
  [
    ('pretrain.batch', 0, '1 or more'),
    ('pretrain.eval_every', -1, '1 or more'),
    ('pretrain.eval_windows', 0, '1 or more'),
    ('pretrain.seed', -1, '0 or more'),
    ('pretrain.learning_rate', -1.0, 'positive'),
    ('pretrain.learning_rate', float('nan'), 'positive'),
    ('pretrain.clip', 0.0, 'positive'),
    ('pretrain.steps', 0, '1 or more'),
    ('pretrain.warmup', -1, '0 or more'),
    ('distill.warmup', 4, 'less than distill.steps'),
    ('distill.weight_decay', -0.1, '0 or positive'),
    ('distill.accumulate', 0, '1 or more'),
    ('distill.accumulate', 4, 'a multiple of distill.accumulate'),
    ('distill.dtype', 'float16', 'use float32 or bfloat16'),
    ('distill.patience', -1, '0 or more'),
    ('target.layers', 0, '1 or more'),
    ('target.width', 0, '1 or more'),
    ('target.heads', 3, 'multiple'),
    ('draft.model.heads', 0, '1 or more'),
    ('draft.drafter', 'nope', 'no drafter'),
    ('loss.kl_weight', -1.0, '0 or more'),
    ('loss.divergence', 'nope', 'no divergence'),
    ('loss.horizon_decay', -0.1, '0 or positive'),
    ('loss.lookahead', -1, '0 or more'),
    ('loss.beta', 1.0, r'inside \(0, 1\)'),
    ('loss.eta', -1.0, '0 or positive'),
    ('ablation.axes.loss.kl_weight', (), 'at least one value'),
    ('ablation.axes.loss.kl_weight', (1.0, float('nan')), 'nan'),
    ('ablation.together', 0, '1 or more'),
    ('ablation.timed_prompts', -1, '0 or more'),
    ('validation.tokens', 0, '1 or more'),
    ('validation.prompt_length', 0, '1 or more'),
    ('decode.temperature', -1.0, '0 or positive'),
    ('decode.verify', 'nope', 'no rule'),
    ('data.corpus', -0.5, '0 or positive'),
    ('data.target', float('nan'), '0 or positive'),
    ('data.target', 0.5, 'data.draft sum to 1.5: .* must sum to 1'),
    ('data.corpus', 0.9999, 'must sum to 1'),
    ('data.refresh', 0, '1 or more'),
    ('data.sequences', 0, '1 or more'),
    ('data.temperature', -1.0, '0 or positive'),
    ('speedup.batches', (0,), '1 or more'),
    ('speedup.batches', (), 'at least one value'),
    ('speedup.ks', (), 'at least one value'),
    ('speedup.repeats', 0, '1 or more'),
    ('speedup.controlled_k', 0, '1 or more'),
    ('speedup.controllers', ('fixed',), 'are the fixed lengths'),
    ('speedup.controllers', ('longest',), 'take one of fixed, fallback'),
    ('decode.draft_length', 'longest', 'take one of fixed, fallback'),
    ('speedup.others', 0, '1 or more'),
    ('draft_sizes.width', (), 'at least one value'),
    ('draft_sizes.width', (32, 0), '1 or more'),
    ('draft_sizes.width', (32,), 'different lengths .*width 1'),
    ('draft_sizes.width', (32, 32), 'two drafts of width 32 and 1 layers'),
    ('draft_sizes.learning_rate', (4e-3, 0.0), 'positive'),
    ('draft_sizes.heads', (3, 1), 'draft_sizes: width 32 does not divide'),
    ('draft_sizes.kv_heads', (1, 2), 'draft_sizes: 1 heads cannot share'),
  ],
)
def test_a_value_that_makes_no_sense_is_named_and_leaves_no_trace(
  path, value, words, tmp_path
):
  config = changed(path, value)
  with pytest.raises(ValueError, match=words) as error:
    Workspace.create(tmp_path / 'run', config)
  if words[0].isdigit() or 'positive' in words:
    assert path in str(error.value)
  assert not (tmp_path / 'run').exists()


SIZES = 'width', 'layers', 'heads', 'kv_heads', 'hidden', 'dtype'
TRAINING = 'steps', 'batch', 'learning_rate', 'warmup', 'weight_decay', 'clip'
# Of the first page that there was.
EARLY = {
  'corpus': ('name', 'text_field', 'tokenizer', 'vocab_size', 'window'),
  'target': SIZES,
  'pretrain': (*TRAINING, 'eval_every', 'eval_windows', 'seed'),
  'distill': (*TRAINING, 'eval_every', 'seed'),
  'loss': ('kl_weight',),
  'validation': ('sequences', 'prompt_length', 'tokens'),
  'decode': ('k', 'temperature', 'max_new_tokens', 'prompt_length'),
  'speedup': ('batches', 'temperatures', 'ks', 'prompts', 'repeats'),
}


def early(page):
  """A configuration from before all that was added."""
  found = {
    section: {key: page[section][key] for key in keys}
    for section, keys in EARLY.items()
  }
  model = {key: page['draft']['model'][key] for key in SIZES}
  return {**found, 'draft': {'drafter': 'model', 'model': model}}


def test_what_was_added_to_pages_does_in_older_runs_what_they_did():
  page = experiment.load(scripts.ROOT / 'configs' / 'stdlib.py').to_dict()
  found = runs.complete(early(page))
  # An arm that was not asked for then is not run now.
  page['speedup']['controllers'] = ()
  assert found == {key: page[key] for key in found}
  assert set(page) - set(found) == {'ablation', 'draft_sizes', 'workdir'}
  settings.check(found)


def test_a_run_from_before_is_opened_and_gone_on_with(tmp_path):
  old = early(PAGE)
  runs.write_json(tmp_path / 'config.json', old)
  (tmp_path / 'corpus.json').touch()
  found = Workspace.look_at(tmp_path, runs.read_json(tmp_path / 'config.json'))
  assert found.config['loss']['divergence'] == 'forward_kl'
  run = Workspace.create(tmp_path, PAGE)
  assert run.config['corpus']['test'] == ''
  with pytest.raises(ValueError, match='corpus.test:  -> files:x'):
    Workspace.create(tmp_path, changed('corpus.test', 'files:x'))


def test_a_draft_from_before_a_key_of_the_loss_is_not_refused(tmp_path):
  config = {key: PAGE[key] for key in recipes.DRAFT_SECTIONS}
  drafts = Checkpoints(tmp_path)
  meta = {
    'config': {**config, 'loss': {'kl_weight': PAGE['loss']['kl_weight']}}
  }
  drafts.save(1, {'model': jnp.zeros(1)}, meta, score=0.0)
  recipes.refuse_other_draft(tmp_path, PAGE)
  recipes.refuse_other_draft(tmp_path, changed('decode.temperature', 0.5))
  with pytest.raises(ValueError, match='loss.divergence: forward_kl -> jsd'):
    recipes.refuse_other_draft(tmp_path, changed('loss.divergence', 'jsd'))
  # Warped, the temperature is part of the loss.
  warped = changed('loss.at_decode_warp', True)
  warped['decode']['temperature'] = 0.5
  with pytest.raises(ValueError, match='loss.temperature: 1.0 -> 0.5'):
    recipes.refuse_other_draft(tmp_path, warped)


def test_a_refused_command_leaves_the_configuration_of_a_run(tmp_path):
  Workspace.create(tmp_path, PAGE)
  before = (tmp_path / 'config.json').read_bytes()
  with pytest.raises(ValueError):
    Workspace.create(tmp_path, changed('decode.k', 0))
  assert (tmp_path / 'config.json').read_bytes() == before


@pytest.mark.parametrize('section', ['pretrain', 'distill'])
def test_rows_that_a_mesh_cannot_divide_are_refused_before_a_run_is_made(
  tmp_path, monkeypatch, section
):
  mesh = AbstractMesh((4, 1, 2), sharding.AXES)
  monkeypatch.setattr(sharding, 'make', lambda **sizes: mesh)
  config = changed(f'{section}.batch', 6)
  config[{'pretrain': 'distill', 'distill': 'pretrain'}[section]]['batch'] = 8
  with pytest.raises(ValueError, match=rf'{section}\.batch is 6, .* 4 parts'):
    recipes.open_to_train(tmp_path / 'run', config, 'pretrain', 'distill')
  assert not (tmp_path / 'run').exists()
  config[section]['batch'] = 8
  run = recipes.open_to_train(tmp_path / 'run', config, 'pretrain', 'distill')
  assert run.mesh is mesh


def test_only_one_process_trains_in_a_folder(tmp_path):
  with files.alone(tmp_path), pytest.raises(RuntimeError, match='another'):
    with files.alone(tmp_path):
      pass
  with files.alone(tmp_path):
    pass


def test_negative_draft_lengths_are_refused():
  for make in (lambda: ModelDrafter(None, -1), lambda: NGram(-1)):
    with pytest.raises(ValueError, match='k is -1'):
      make()
  with pytest.raises(ValueError, match='one length'):
    Committee((NGram(1), NGram(2)))


@pytest.mark.parametrize('source', ['target', 'draft'])
def test_text_that_cannot_be_written_is_refused(source):
  config = changed('data.corpus', 0.5)
  config['data'][source] = 0.5
  settings.check(config)
  config['data']['tokens'] = config['corpus']['window']
  with pytest.raises(ValueError, match=r'4 \+ 32: it must fit .* 32'):
    settings.check(config)
  # Nothing is written of a corpus.
  config['data'] |= {'corpus': 1.0, source: 0.0}
  settings.check(config)


def test_a_drafter_without_a_model_writes_nothing_alone():
  config = changed('draft.drafter', 'ngram')
  config['data'] |= {'corpus': 0.0, 'target': 1.0}
  settings.check(config)
  config['data'] |= {'target': 0.9, 'draft': 0.1}
  with pytest.raises(ValueError, match="'ngram', which writes no text alone"):
    settings.check(config)


def test_text_is_as_warm_as_decoding_unless_it_is_said():
  page = scripts.ROOT / 'configs' / 'stdlib.py:tiny'

  def temperatures(*arguments):
    config = experiment.override(experiment.load(page), arguments).to_dict()
    return config['decode']['temperature'], config['data']['temperature']

  assert temperatures() == (1.0, 1.0)
  assert temperatures('--config.decode.temperature=0.5') == (0.5, 0.5)
  assert temperatures('--config.data.temperature=0.5') == (1.0, 0.5)


def test_a_draft_of_more_tokens_than_there_are_is_refused():
  config = changed('corpus.tokenizer', 'bytes')
  config['draft'] |= {'drafter': 'eagle', 'eagle': {'unroll': 2}}
  settings.check(config | {'draft': {**config['draft'], 'vocab_size': 257}})
  with pytest.raises(ValueError, match='is 258: .* has 257 tokens'):
    settings.check(config | {'draft': {**config['draft'], 'vocab_size': 258}})


def test_a_lookahead_is_along_what_passes():
  config = changed('loss.lookahead', 2)
  with pytest.raises(ValueError, match="for 'neg_log_acceptance'"):
    settings.check(config)
  for name in ('neg_log_acceptance', 'specjax.losses:neg_log_acceptance'):
    config['loss']['divergence'] = name
    settings.check(config)
  config['draft'] |= {'drafter': 'medusa', 'medusa': {'heads': 3}}
  with pytest.raises(ValueError, match="'medusa' has 3 horizons"):
    settings.check(config)


def test_a_draft_fits_in_the_texts_that_it_is_measured_on():
  settings.check(changed('decode.k', 8))
  with pytest.raises(ValueError, match='validation.tokens, which is 8'):
    settings.check(changed('decode.k', 9))


def test_scores_at_another_length_are_not_compared(tmp_path):
  """Unless there is nothing left to compare."""
  steps = PAGE['distill']['steps']
  for done in (steps - 1, steps):
    meta = {'config': recipes.made_with(PAGE)}
    Checkpoints(tmp_path).save(done, {'model': jnp.zeros(1)}, meta)
    other = changed('decode.k', 1)
    if done < steps:
      with pytest.raises(ValueError, match='decode.k: 2 -> 1'):
        recipes.refuse_other_draft(tmp_path, other)
    else:
      recipes.refuse_other_draft(tmp_path, other)
