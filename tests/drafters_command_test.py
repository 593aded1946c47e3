"""The comparison of ways to draft: how arms are named, paired and measured."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
import scripts
import toys

from specjax import (
  contest,
  corpora,
  decode,
  draft_length,
  experiment,
  pricing,
  proposers,
  runs,
  sweep,
  verify,
  warps,
)
from specjax.candidates import CandidateTree, sparse_tree
from specjax.checkpoint import Checkpoints
from specjax.contest import PLAIN, Arm, Way
from specjax.drafters.committee import Committee
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.mixture import Mixture
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.tree import TreeDrafter
from specjax.workspace import Workspace

PAGE = experiment.load(scripts.ROOT / 'configs' / 'heads.py:tiny').to_dict()
TARGET = toys.transformer()
MODEL = ModelDrafter(toys.transformer(1, layers=1), 3)
TREE = TreeDrafter(MODEL.model, 2, branching=(2, 2))
HEADS = toys.heads(16, 3)


@pytest.mark.parametrize(
  ('text', 'way', 'name'),
  [
    ('ngram', Way('ngram', '', 6), 'ngram@6'),
    ('suffix@3', Way('suffix', '', 3), 'suffix@3'),
    ('model:kl1@4', Way('model', 'kl1', 4), 'model:kl1@4'),
    ('early_exit:2', Way('early_exit', '2', 6), 'early_exit:2@6'),
    (
      'committee:one+other@2',
      Way('committee', 'one,other', 2),
      'committee:one+other@2',
    ),
    (
      'iid:sizes/64x2',
      Way('iid', 'sizes/64x2', 2, branching=(2, 2)),
      'iid:sizes/64x2@2x2',
    ),
    (
      'distinct:d@3x2x1',
      Way('distinct', 'd', 3, branching=(3, 2, 1)),
      'distinct:d@3x2x1',
    ),
    ('candidates:m', Way('candidates', 'm', None, 6), 'candidates:m@6'),
    ('candidates:m@16/4', Way('candidates', 'm', 4, 16), 'candidates:m@16/4'),
  ],
)
def test_a_way_to_draft_is_a_line_of_text(text, way, name):
  assert contest.parse(text, 6) == way
  assert way.name == name and contest.parse(name, 2) == way


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('', 'is of no kind'),
    ('none', 'is of no kind'),
    ('modle:draft', 'one of model, coupled'),
    ('model', 'needs a draft behind the colon'),
    ('early_exit', 'needs a draft'),
    ('ngram:draft', 'has a draft'),
    ('model:draft@', 'write it as model@4'),
    ('model:draft@0', 'has no size'),
    ('model:draft@4/2', 'has no size'),
    ('distinct:draft@2,2', 'write it as distinct@3x2'),
    ('candidates:m@8/4/2', 'write it as candidates@8 or 8/4'),
    ('model:draft:x@4', "names no draft: 'draft:x'"),
    ('model: draft', "names no draft: ' draft'"),
    ('model:a+b', "names no draft: 'a.b'"),
    ('committee:a+@4', "names no draft: 'a.'"),
  ],
)
def test_what_is_no_way_to_draft_is_refused(text, words):
  with pytest.raises(ValueError, match='arm .* ' + words):
    contest.parse(text, 6)


def test_rules_meet_the_drafts_that_they_verify():
  rules = {
    name: verify.RULES[name]
    for name in ('rejection', 'block', 'traversal', 'k_seq', 'sampler_match')
  }
  drafters = {'chain': MODEL, 'tree': TREE}
  arms, left_out = contest.pair(TARGET, drafters, rules)
  assert set(arms) == {
    Arm('chain', 'rejection'),
    Arm('chain', 'block'),
    Arm('chain', 'k_seq'),
    Arm('chain', 'sampler_match'),
    Arm('tree', 'rejection'),
    Arm('tree', 'traversal'),
    Arm('tree', 'sampler_match'),
  }
  why = {(row['drafter'], row['rule']): row['why'] for row in left_out}
  assert why['chain', 'traversal'] == 'on a chain it is block'
  assert 'chain' in why['tree', 'block'] and 'distinct' in why['tree', 'k_seq']
  # Without block there is nothing that traversal repeats.
  alone = {'traversal': verify.traversal}
  assert contest.pair(TARGET, {'chain': MODEL}, alone) == (
    [Arm('chain', 'traversal')],
    [],
  )
  coupled = {'coupled': CoupledDrafter(MODEL.model, 2)}
  with pytest.raises(ValueError, match='no rule verifies coupled: .*coupled'):
    contest.pair(TARGET, coupled, {'rejection': verify.rejection})


def test_a_way_is_compared_with_what_it_is_made_of():
  ways = [
    contest.parse(text, 4)
    for text in (
      'ngram',
      'suffix',
      'model:a',
      'model:b',
      'candidates:b',
      'mixture:a',
      'early_exit:1',
    )
  ]
  found = {
    (one.name, other.name)
    for one in ways
    for other in ways
    if contest.rivals(one, other)
  }
  assert found == {
    ('candidates:b@4', 'model:b@4'),
    ('mixture:a@4', 'model:a@4'),
    ('mixture:a@4', 'suffix@4'),
    ('early_exit:1@4', 'model:a@4'),
    ('early_exit:1@4', 'model:b@4'),
  }


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of a page of heads; nothing in it was trained."""
  folder = tmp_path_factory.mktemp('runs')
  (folder / 'documents').mkdir()
  for i in range(400):
    path = folder / 'documents' / f'{i}.txt'
    path.write_text(f'{i:04} is a number like {i + 1:04}.\n' * 3)
  config = copy.deepcopy(PAGE)
  config['validation'] |= {'sequences': 16, 'tokens': 8}
  found = Workspace(folder / 'run', config)
  found.corpus = corpora.load(
    f'files:{folder}/documents/*.txt', data_dir=folder / 'cache'
  )
  rng = np.random.default_rng(1)
  heads = found.new_drafter(1)
  lively = jax.tree.map(
    lambda x: np.float32(rng.normal(0, 0.5, x.shape)), heads.heads
  )
  heads = dataclasses.replace(heads, heads=lively)
  models = {'target': found.new_target(0), 'heads': heads}
  for name, model in models.items():
    about = found.target_config if name == 'target' else found.draft_config
    Checkpoints(found.folder / name).save(
      config['pretrain']['steps'],
      {'model': model},
      {'model': about, 'tokenizer': found.tokenizer.hash},
    )
  return found


@pytest.mark.slow
def test_a_size_is_what_the_target_scores(run):
  target = run.target()
  for text in (
    'ngram@2',
    'model:heads@2',
    'candidates:heads@2',
    'candidates:heads@5/1',
    'candidates:heads@7',
    'early_exit:1@3',
  ):
    way = contest.parse(text, 9)
    draft = decode.shapes(target, way.drafter(run, 1.0))
    assert draft.tokens.shape == (1, int(text.split('@')[1].split('/')[0]))
  assert (decode.shapes(TARGET, TREE).tokens.shape) == (1, 2 + 2 * 2)


def test_a_tree_of_so_many_nodes_is_the_best_for_measured_accuracy(run):
  accuracy = proposers.rank_accuracy(run, 'heads')
  text = run.rollouts(None, 1.0)
  heads, ranks = accuracy.shape
  assert heads == 2 and (accuracy >= 0).all()
  assert 0 < accuracy.sum(1).max() <= 1 + 1e-6
  # The slow way: a logit above another at every place of the text.
  drafter, target = run.drafter('heads'), run.target()
  hits, weight = np.zeros(ranks), 0
  for row in text:
    batch = jax.tree.map(lambda x: x[None], row)
    output = target.forward(batch.tokens, batch.segments)
    scored = drafter.score(target, batch, output)[0, :, 1]
    logits = np.asarray(drafter.unembed(target, scored))
    for t in range(len(row.tokens) - 2):
      if row.weight[t + 2] > 0:
        rank = (logits[t] > logits[t, row.tokens[t + 2]]).sum()
        weight += 1
        if rank < ranks:
          hits[rank] += 1
  np.testing.assert_allclose(accuracy[1], hits / weight, atol=1e-6)
  tree = proposers.make(run, 'candidates', 'heads', nodes=6)
  assert set(tree.paths) == set(sparse_tree(accuracy, 6))


def test_candidates_keep_the_tree_that_they_were_trained_with(run, tmp_path):
  config = copy.deepcopy(run.config)
  paths = (0,), (1,), (2,), (0, 0)
  config['draft']['medusa']['paths'] = paths
  other = Workspace(run.folder, config)
  Checkpoints(run.folder / 'sparse').save(
    4,
    {'model': other.new_drafter(1)},
    {'model': other.draft_config, 'tokenizer': other.tokenizer.hash},
  )
  assert set(proposers.make(run, 'candidates', 'sparse').paths) == set(paths)
  asked = proposers.make(run, 'candidates', 'sparse', branching=(1, 1))
  assert set(asked.paths) == {(0,), (0, 0)}
  fallback = proposers.make(run, 'candidates', 'heads')
  assert len(fallback.paths) == 2 + 2 * 2
  tree = CandidateTree(HEADS.heads, 2, paths=((0,), (1,)))
  with pytest.raises(ValueError, match='x drafts a tree.*eval/drafters.py'):
    sweep.Race(
      TARGET,
      tree,
      name='x',
      ks=(1,),
      ngram_k=1,
      groups=[[[1]]],
      others=[],
      max_new_tokens=1,
    )


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (('early_exit', '3'), '1 to 1, not'),
    (('early_exit', 'heads'), "not 'heads'"),
    (('distinct', 'heads'), 'made for draft models'),
    (('candidates', 'nothing'), 'no nothing yet'),
  ],
)
def test_what_a_run_cannot_draft_with_is_refused(run, arguments, words):
  with pytest.raises((ValueError, FileNotFoundError), match=words):
    proposers.make(run, *arguments)


def test_a_mixture_has_no_cost_of_its_own(run):
  config = copy.deepcopy(run.config)
  config['decode']['draft_length'] = 'adaptive'
  other = Workspace(run.folder, config)
  mixture = Mixture(NGram(3), MODEL)
  with pytest.raises(ValueError, match='depends on the text'):
    other.controller('mixture', TARGET, mixture)


def test_a_warp_and_a_price_are_those_of_all_parts():
  greedy = warps.Temperature(0.0)
  mixture = Mixture(NGram(3), MODEL)
  assert pricing.with_warp(mixture, greedy).model.warp == greedy
  members = pricing.with_warp(Committee((MODEL, MODEL)), greedy).members
  assert [member.warp for member in members] == [greedy] * 2

  def key(drafter):
    return pricing.key(TARGET, drafter, verify.rejection, greedy, 1, 64)

  wide = ModelDrafter(toys.transformer(1, layers=2), 3)
  places = [
    key(x)
    for x in (
      mixture,
      Mixture(NGram(3, 9, 2), MODEL),
      Mixture(NGram(3), wide),
      Committee((MODEL,)),
      Committee((wide,)),
    )
  ]
  for i, place in enumerate(places):
    assert place not in places[:i]
    assert place == json.loads(json.dumps(place))
  assert key(mixture.at(2)) == places[0]


SCRIPT = scripts.load('eval/drafters.py')


def test_missing_drafts_are_refused_with_what_trains_them(run):
  config = copy.deepcopy(run.config)
  config['drafters'] |= {
    'arms': ('ngram', 'model:heads', 'candidates:medusa', 'model:mine'),
    'pages': {'medusa': 'configs/heads.py'},
    'betas': (),
  }
  with pytest.raises(FileNotFoundError) as error:
    SCRIPT.prepare(Workspace(run.folder, config))
  assert str(error.value) == (
    f'{run.folder} has no medusa, mine yet: run `python train/distill.py'
    f' --config configs/heads.py --workdir {run.folder} --draft=medusa` and'
    f' `python train/distill.py --workdir {run.folder} --draft=mine`'
  )
  config['drafters'] |= {'arms': ('model:heads@3',)}
  with pytest.raises(ValueError, match=r'model:heads@3: .* has 2 heads'):
    SCRIPT.prepare(Workspace(run.folder, config))
  config['drafters'] |= {'betas': (0.1,), 'amateur': 'heads', 'arms': ()}
  config['drafters'] |= {'contrastive_arms': ('ngram',)}
  with pytest.raises(ValueError, match="amateur is 'heads'"):
    SCRIPT.prepare(Workspace(run.folder, config))


def test_an_older_run_has_the_arms_of_the_page():
  page = experiment.load(scripts.ROOT / 'configs' / 'stdlib.py').to_dict()
  older = {name: page[name] for name in ('decode', 'speedup')}
  assert runs.complete(older)['drafters'] == page['drafters']


def test_an_arm_that_is_not_lossless_is_named():
  rows = [
    {
      'beta': beta,
      'drafter': 'a@1',
      'rule': rule,
      'mismatches': [{'margin': margin}],
    }
    for beta, rule, margin in (
      (None, 'rejection', 3e-5),
      (0.1, 'rejection', 0.2),
      (None, 'lenience', 0.3),
    )
  ]
  certificate = {'beta': None, 'drafter': 'b@1', 'rule': 'block'}
  report = {
    'rows': rows,
    'certificates': [certificate | {'verdict': 'FAIL'}],
    'lossy': ['lenience'],
    'config': {'target': {'dtype': 'float32'}},
  }
  assert SCRIPT.failures(report) == [
    (0.1, 'a@1', 'rejection'),
    (None, 'b@1', 'block'),
  ]
  report['config']['target']['dtype'] = 'bfloat16'
  assert SCRIPT.failures(report) == [(None, 'b@1', 'block')]
  assert [SCRIPT.identity(row) for row in rows[:2]] == ['tie 3e-05', 'NO 0.2']


@pytest.mark.slow  # a program for every arm
def test_arms_share_prompts_keys_and_lengths():
  rules = {name: verify.RULES[name] for name in ('rejection', 'sampler_match')}
  drafters = {'chain': MODEL, 'tree': TREE, 'ngram': NGram(3)}
  arms, _ = contest.pair(TARGET, drafters, rules)
  prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 4, 6]]
  controllers = {'chain': draft_length.find('fallback', 3)}
  cold, warm = (
    contest.Contest(
      TARGET,
      drafters,
      rules,
      arms,
      groups=[prompts[:2], prompts[2:]],
      max_new_tokens=24,
      temperature=t,
      controllers=controllers,
    )
    for t in (0.0, 1.0)
  )
  lowered = cold.lowered()
  assert len(lowered) == cold.programs == 1 + 6 + 3
  assert warm.lowered(known=lowered) == {}  # a temperature is a number
  programs = {
    name: low.compile(compiler_options=toys.QUICK)
    for name, low in lowered.items()
  }
  for found in (cold, warm):
    found.compiled(programs)
    rows = found.run(2)
    assert [Arm(row['drafter'], row['rule']) for row in rows] == arms
    plain = [r.new_tokens() for r in found.results[PLAIN]]
    matching = None
    for row in rows:
      arm = Arm(row['drafter'], row['rule'])
      own = [r.new_tokens() for r in found.results[arm]]
      assert [len(x) for group in own for x in group] == [24] * 4
      if found is cold:
        assert own == plain
      elif arm.rule == 'sampler_match':  # whatever is drafted
        matching = matching or own
        assert own == matching
      assert row['nodes'] == {'chain': 3, 'tree': 6, 'ngram': 3}[arm.drafter]
      assert row['tree'] == (arm.drafter == 'tree')
      lengths = sum(r.stats.lengths.sum(0) for r in found.results[arm])
      assert lengths[:-1].any() == (arm.drafter == 'chain')
      assert row['draft_cost'] > 0 and 0 <= (row['acceptance'] or 0) <= 1
      count = sum(int(r.stats.rounds.sum()) for r in found.results[arm])
      assert row['tokens_per_round'] == pytest.approx(4 * 24 / count)
      assert row['mismatches'] == ([] if found is cold else None)
      assert row['speedup_min'] <= row['speedup'] <= row['speedup_max']
  one, other = Arm('tree', 'rejection'), Arm('chain', 'rejection')
  there, back = (warm.against(*pair) for pair in ((one, other), (other, one)))
  assert there.min == pytest.approx(1 / back.max)


@pytest.mark.slow
def test_the_command_writes_what_it_says(tmp_path):
  folder = tmp_path / 'run'
  here = '--config=configs/drafters.py:tiny', f'--workdir={folder}'
  code, _, error = scripts.run('train/distill.py', *here)
  assert code == 0, error
  arms = '--arms=ngram,model:draft,distinct:draft@2'
  flags = arms, '--config.drafters.batches=1', '--num_tokens=1000', '--tables=1'
  code, out, error = scripts.run('eval/drafters.py', *here, *flags)
  assert code == 0, error
  report = json.loads((folder / 'drafters.json').read_text())
  arms = {(row['drafter'], row['rule']) for row in report['left_out']}
  assert arms == {
    ('ngram@2', 'traversal'),
    ('model:draft@2', 'traversal'),
    ('distinct:draft@2', 'block'),
  }
  arms = [
    (None, 'ngram@2', 'rejection'),
    (None, 'ngram@2', 'block'),
    (None, 'model:draft@2', 'rejection'),
    (None, 'model:draft@2', 'block'),
    (None, 'distinct:draft@2', 'rejection'),
    (None, 'distinct:draft@2', 'traversal'),
    (0.5, 'model:draft@2', 'rejection'),
    (0.5, 'ngram@2', 'rejection'),
  ]
  certified = {
    (row['beta'], row['drafter'], row['rule']): row['verdict']
    for row in report['certificates']
  }
  assert certified == dict.fromkeys(arms, 'PASS')
  rows = {
    (row['beta'], row['drafter'], row['rule'], row['temperature']): row
    for row in report['rows']
  }
  assert set(rows) == {(*arm, t) for arm in arms for t in (0.0, 1.0)}
  for row in rows.values():
    assert row['nodes'] == 2 and 1 <= row['tokens_per_round'] <= 3
  pairs = {
    (row['arm']['rule'], row['against']['rule'], row['temperature'])
    for row in report['pairs']
  }
  assert pairs == {
    (one, other, t)
    for one, other in (('rejection', 'rejection'), ('traversal', 'block'))
    for t in (0.0, 1.0)
  }
  assert 'contrastive, β = 0.5; T = 1, batch 1' in out
  assert 'as many scored nodes' in out and 'false alarm' in out
  assert (folder / 'drafters.png').stat().st_size > 10_000
