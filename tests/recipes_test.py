import copy

import jax
import numpy as np
import pytest
import scripts

from specjax import corpora, experiment, logs, recipes, texts
from specjax.checkpoint import Checkpoints
from specjax.workspace import Workspace

PAGE = experiment.load(scripts.ROOT / 'configs' / 'stdlib.py:tiny').to_dict()
MIXED = {'corpus': 0.5, 'target': 0.25, 'draft': 0.25}

pytestmark = pytest.mark.usefixtures('quick_compilation')


def workspace(folder, **changes):
  """A run over documents that begin with their number."""
  config = copy.deepcopy(PAGE)
  for section, values in changes.items():
    config[section] |= values
  documents = folder / 'documents'
  documents.mkdir(exist_ok=True, parents=True)
  for i in range(400):
    (documents / f'{i}.txt').write_text(
      f'{i:04} is a number like {i + 1:04}.\n' * 3
    )
  run = Workspace(folder / 'run', config)
  run.corpus = corpora.load(
    f'files:{documents}/*.txt', data_dir=folder / 'cache'
  )
  return run


@pytest.mark.slow
def test_prompts_are_of_documents_to_train_on_and_none_that_is_held_out(
  tmp_path,
):
  run = workspace(tmp_path, data={**MIXED, 'corpus': 0.0, 'target': 0.75})
  drafter = run.new_drafter(1)
  batches = recipes.batches(run, run.new_target(0), 'draft')
  seen = set()
  for step in range(0, 12, run.config['data']['refresh']):
    batch = batches(step, drafter)
    for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
      for segment in range(1, segments.max() + 1):
        prompt = tokens[segments == segment][:4]
        seen.add(run.tokenizer.decode(prompt.tolist()))
  numbers = {
    split: {text[:4] for text in run.corpus.splits[split]}
    for split in ('train', 'validation', 'test')
  }
  assert numbers['validation'] and numbers['test']
  assert len(seen) > 8 and seen <= numbers['train']
  assert not seen & (numbers['validation'] | numbers['test'])


@pytest.mark.slow
def test_how_a_draft_is_scored_does_not_change_its_text(tmp_path):
  run = workspace(tmp_path, data={'corpus': 0.0, 'target': 1.0, 'refresh': 2})
  target, drafter = run.new_target(0), run.new_drafter(1)
  recipes.batches(run, target, 'draft')(2, drafter)
  other = workspace(tmp_path, data={**run.config['data']})
  other.config['decode']['temperature'] = 0.5
  # In the middle of a generation only what was written for it will do.
  recipes.batches(other, target, 'draft')(3, drafter)
  other.config['distill']['seed'] += 1
  with pytest.raises(ValueError, match='made from something else'):
    recipes.batches(other, target, 'draft')(3, drafter)


@pytest.mark.slow
def test_a_distillation_that_dies_goes_on_to_the_same_bits(
  tmp_path, monkeypatch
):
  distil = {'steps': 6, 'eval_every': 3, 'batch': 4}
  runs = [
    workspace(tmp_path / name, distill=distil, data=MIXED) for name in 'ab'
  ]
  target, make = runs[0].new_target(0), recipes.batches
  recipes.distil(runs[0], target, 'draft')

  def dying(at):
    def batches(*args):
      whole = make(*args)

      def batch(step, drafter):
        if step == at:
          raise KeyboardInterrupt
        return whole(step, drafter)

      return batch

    return batches

  for at in (1, 4, 5):
    monkeypatch.setattr(recipes, 'batches', dying(at))
    with pytest.raises(KeyboardInterrupt):
      recipes.distil(runs[1], target, 'draft')
  monkeypatch.setattr(recipes, 'batches', make)
  recipes.distil(runs[1], target, 'draft')
  like = jax.eval_shape(lambda: runs[0].new_drafter(0))
  a, b = (
    Checkpoints(run.folder / 'draft').restore(6, {'model': like})
    for run in runs
  )
  jax.tree.map(np.testing.assert_array_equal, a, b)
  for name in ('target', 'draft'):
    log = runs[1].folder / 'logs' / 'written' / 'draft' / f'{name}.jsonl'
    assert [line['step'] for line in logs.read(log)] == [0, 2, 4]


def test_held_out_text_is_kept_and_weighs_what_the_target_wrote(tmp_path):
  run = workspace(tmp_path, validation={'sequences': 3})
  rows = run.rollouts(run.new_target(0), 1.0)
  (path,) = (run.folder / 'rollouts').glob('*.npz')
  before = path.stat().st_mtime_ns
  again = run.rollouts(None, 1.0)  # read, not written
  assert path.stat().st_mtime_ns == before
  held_out = {text[:4] for text in run.corpus.splits['validation']}
  for row, other, length in zip(
    rows, again, texts.load(path).length, strict=True
  ):
    jax.tree.map(np.testing.assert_array_equal, row, other)
    assert run.tokenizer.decode(row.tokens[:4].tolist()) in held_out
    position = np.arange(len(row.tokens))
    np.testing.assert_array_equal(
      row.weight, (position >= 4) & (position < length)
    )
  path.write_bytes(b'')
  with pytest.raises(ValueError, match='damaged.*delete it'):
    run.rollouts(None, 1.0)


def test_a_draft_from_before_there_were_sources_is_one_of_corpus(tmp_path):
  config = {key: PAGE[key] for key in recipes.DRAFT_SECTIONS if key != 'data'}
  Checkpoints(tmp_path).save(1, {'model': np.zeros(1)}, {'config': config})
  recipes.refuse_other_draft(tmp_path, PAGE)
  # How nothing would be written makes no difference.
  colder = {**PAGE['data'], 'temperature': 0.5}
  recipes.refuse_other_draft(tmp_path, {**PAGE, 'data': colder})
  with pytest.raises(ValueError, match='data.target: 0.0 -> 0.25'):
    mixed = {**PAGE['data'], **MIXED}
    recipes.refuse_other_draft(tmp_path, {**PAGE, 'data': mixed})


@pytest.mark.parametrize(
  'name', ['', '.', '/tmp/kl1', '../../kl1', 'sizes/../kl1', 'target', 'logs/a']
)
def test_a_draft_is_kept_in_its_run_where_nothing_else_is(name):
  with pytest.raises(
    ValueError, match='a draft is kept in a folder of its run'
  ):
    recipes.refuse_draft_name(name)


@pytest.mark.parametrize('name', ['draft', 'kl1', 'sizes/128x2', '..kl1'])
def test_a_draft_may_have_any_other_name(name):
  recipes.refuse_draft_name(name)


def test_a_draft_that_is_half_trained_is_told_once(tmp_path, capsys):
  run = workspace(tmp_path, distill={'steps': 4})
  meta = {'model': run.target_config, 'tokenizer': run.tokenizer.hash}
  target = run.new_target(0)
  steps = run.config['pretrain']['steps']
  Checkpoints(run.folder / 'target').save(steps, {'model': target}, meta)
  drafter = run.new_drafter(1)
  meta = {
    'model': run.draft_config,
    'tokenizer': run.tokenizer.hash,
    'config': recipes.made_with(run.config),
  }
  for name, done in (('half', 2), ('whole', 4)):
    Checkpoints(run.folder / name).save(done, {'model': drafter}, meta)
    for _ in range(2):
      run.drafter(name)
  said = capsys.readouterr().err
  assert said.count('half is at step 2 of 4: `python train/distill.py') == 1
  assert 'whole' not in said
  with pytest.raises(ValueError, match='target is what is drafted for'):
    run.drafter('target')


@pytest.mark.slow
def test_a_draft_may_begin_as_some_of_the_target_s_layers(tmp_path):
  run = workspace(tmp_path, target={'layers': 3}, draft={'target_layers': (2,)})
  target, sizes = run.new_target(0), run.target_config
  meta = {'model': sizes, 'tokenizer': run.tokenizer.hash}
  steps = run.config['pretrain']['steps']
  Checkpoints(run.folder / 'target').save(steps, {'model': target}, meta)
  model = run.new_drafter(1).model
  pairs = [
    (model.embedding, target.embedding),
    (model.norm, target.norm),
    (model.layers[0].qkv, target.layers[2].qkv),
    (model.layers[0].down, target.layers[2].down),
  ]
  assert len(model.layers) == 1
  for own, theirs in pairs:
    np.testing.assert_array_equal(own[...], theirs[...])
  for changes, words in (
    ({'target_layers': (3,)}, 'the target has 3 layers'),
    ({'target_layers': (-1,)}, 'of a model that has 3'),
    ({'drafter': 'early_exit'}, 'for draft models'),
  ):
    other = Workspace(
      run.folder, {**run.config, 'draft': run.config['draft'] | changes}
    )
    with pytest.raises(ValueError, match=words):
      other.new_drafter(1)
