import json
import shutil

import jax
import numpy as np
import oracles
import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

from specjax import (
  data,
  distill,
  generation,
  logs,
  optimizing,
  sources,
  texts,
  training,
  warps,
)
from specjax.checkpoint import Checkpoints
from specjax.drafters.model import ModelDrafter
from specjax.types import Batch

pytestmark = pytest.mark.usefixtures('quick_compilation')

V, EOS, PROMPT, NEW, WINDOW, T = 5, 4, [2, 1], 3, 12, 0.7
TARGET, DRAFT = toys.markov(0), toys.markov(1)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
  """One program for all."""
  monkeypatch.setattr(texts, 'AT_ONCE', 8)


def draft(step=0):
  """The draft in training: another one before every update."""
  return ModelDrafter(toys.markov(100 + step), 2)


def written(
  folder,
  name='target',
  by=sources.by_target,
  ids=None,
  weight=float('inf'),
  **changes,
):
  writing = {'refresh': 3, 'sequences': 8, 'prompt_length': 2, 'tokens': NEW}
  return sources.Written(
    name,
    by,
    TARGET,
    np.tile([*PROMPT, 0, EOS], 40) if ids is None else ids,
    EOS,
    sources.Writing(**{**writing, 'temperature': T, **changes}),
    window=WINDOW,
    seed=3,
    folder=folder,
    shared=folder / 'shared',
    log=folder / 'log' / name,
    made_from={'corpus': 'x'},
    draft_from={'k': 2, 'weight': weight},
  )


def mixture(folder, shares=(0.5, 0.25, 0.25), batch=4):
  ids = np.random.default_rng(0).integers(0, V, 40 * WINDOW)
  found = (
    sources.Corpus(data.Windows(ids, EOS, WINDOW), 3),
    written(folder),
    written(folder, 'draft', sources.by_draft),
  )
  return sources.Mixture(found, shares, batch)


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


@given(
  st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any),
  st.integers(1, 7),
)
def test_shares_hold_over_a_run_and_in_every_batch_where_they_can(parts, batch):
  shares = [part / sum(parts) for part in parts]
  whole = [batch * part % sum(parts) == 0 for part in parts]
  before = [0] * len(parts)
  for step in range(1, 60):
    now = sources.counts(shares, step * batch)
    assert sum(now) == step * batch
    for i, share in enumerate(shares):
      assert now[i] >= before[i]
      assert abs(now[i] - share * step * batch) <= 1 + 1e-9
      if all(whole):
        assert now[i] - before[i] == round(share * batch)
    before = now


def test_each_source_gives_its_rows_in_order_and_starts_anew_at_a_refresh():
  def source(number, refresh):
    # Row j of a generation holds the source, the step it was made at, and j.
    def rows(step, model):
      since = step - step % refresh
      return [np.array([number, since, j]) for j in range(99)], since

    return rows

  found = sources.Mixture([source(0, 1000), source(1, 4)], [0.7, 0.3], 5)
  seen = np.concatenate([found(step, None) for step in range(20)])
  assert len(seen) == 100
  for number, count in ((0, 70), (1, 30)):
    own = seen[seen[:, 0] == number]
    assert len(own) == count
    for since in set(own[:, 1]):
      j = own[own[:, 1] == since][:, 2]
      np.testing.assert_array_equal(j, range(len(j)))


def test_corpus_alone_is_what_it_was_without_sources():
  ids = np.random.default_rng(1).integers(0, V, 200)
  windows = data.Windows(ids, EOS, 8)
  mixed = sources.Mixture([sources.Corpus(windows, 5)], [1.0], 3)
  plain = data.Batches(windows, 3, seed=5)
  for step in (0, 1, 7, 30):
    assert_same(mixed(step, None), plain[step])


@pytest.mark.slow
def test_text_written_in_parts_is_what_generate_writes(monkeypatch):
  monkeypatch.setattr(texts, 'ROUNDS', 2)
  key, warp = jax.random.key(8), warps.temperature(T)
  prompts = [[i % V, (3 * i) % 4] for i in range(10)]
  text = texts.write(
    TARGET,
    draft(),
    prompts,
    key=key,
    max_new_tokens=9,
    warp=warp,
    eos_id=EOS,
    title='x',
  )
  whole = generation.generate(
    TARGET, draft(), prompts, key=key, max_new_tokens=9, warp=warp, eos=EOS
  )
  np.testing.assert_array_equal(text.tokens, whole.tokens)
  np.testing.assert_array_equal(text.length, whole.length)
  np.testing.assert_array_equal(text.rounds, whole.stats.rounds)
  assert set(text.length) != {11}  # some were ended


def unpacked(rows, count):
  """What was generated in the first `count` sequences, 0 behind its end."""
  found, j = [], 0
  while len(found) < count:
    row, j = rows[j], j + 1
    for segment in range(1, row.segments.max() + 1):
      own = row.segments == segment
      assert row.tokens[own][:2].tolist() == PROMPT
      assert row.weight[own].tolist() == [0, 0] + [1] * (own.sum() - 2)
      new = row.tokens[own][2:].tolist()
      assert EOS not in new[:-1] and (len(new) == NEW or new[-1] == EOS)
      found.append(new + [0] * (NEW - len(new)))
    assert not row.weight[row.segments == 0].any()
  assert len(found) == count
  return found


def law(model):
  table = np.asarray(model.logits[...])
  return oracles.joint(
    table, PROMPT, NEW, lambda logits: oracles.softmax(logits / T), (EOS,)
  )


@pytest.mark.parametrize(
  ('by', 'own', 'other'),
  [
    (sources.by_target, TARGET, DRAFT),
    (sources.by_draft, DRAFT, TARGET),
  ],
)
def test_text_has_the_law_of_who_writes_it(by, own, other, tmp_path):
  ids = np.tile([*PROMPT, EOS], 1500)
  source = written(tmp_path, by=by, ids=ids, sequences=1500)
  rows, since = source(0, ModelDrafter(DRAFT, 2))
  found = unpacked(rows, 1500)
  assert since == 0
  assert oracles.p_value(found, law(own)) > 1e-4
  assert oracles.p_value(found, law(other)) < 1e-4


def run(folder, steps):
  batches = mixture(folder)
  return [batches(step, draft(step)) for step in steps]


def test_a_run_that_is_resumed_has_the_same_batches(tmp_path):
  whole = run(tmp_path / 'a', range(8))
  assert_same(run(tmp_path / 'b', range(5)), whole[:5])
  # In the middle of a generation: its model is gone, its text is there.
  assert_same(run(tmp_path / 'b', range(4, 8)), whole[4:])
  # From before a refresh, and with nothing kept: it is written again.
  assert_same(run(tmp_path / 'b', range(3, 8)), whole[3:])
  shutil.rmtree(tmp_path / 'b')
  assert_same(run(tmp_path / 'b', range(3, 8)), whole[3:])


def first_rows(source, step, drafter):
  rows = source(step, drafter)[0]
  return np.stack([rows[j].tokens for j in range(2)])


def test_each_generation_and_source_has_draws_and_prompts_of_its_own(tmp_path):
  alike = written(tmp_path, 'draft', sources.by_draft)
  other = written(tmp_path, 'other', sources.by_draft)
  drawn = first_rows(alike, 0, draft())
  assert (drawn != first_rows(other, 0, draft())).any()
  assert (drawn != first_rows(alike, 3, draft())).any()
  assert (drawn != first_rows(alike, 0, draft(1))).any()
  # A draft that leaves nothing to chance: only prompts can differ.
  ids = np.concatenate([[i % 4, i // 4, EOS] for i in range(16)])
  greedy = written(
    tmp_path, 'greedy', sources.by_draft, ids=ids, temperature=0.0
  )
  first, second = (first_rows(greedy, step, draft()) for step in (0, 3))
  assert (first != second).any()


def stamp(folder):
  return {path.name: path.stat().st_mtime_ns for path in folder.glob('step*')}


def test_what_is_kept_is_used_at_its_step_only_if_it_would_be_written_again(
  tmp_path,
):
  source = written(tmp_path)
  rows = source(3, draft())[0][0]
  first = stamp(tmp_path)
  assert set(first) == {'step3-target.npz', 'step3-target.json'}
  assert_same(written(tmp_path)(3, draft())[0][0], rows)
  assert stamp(tmp_path) == first
  record = json.loads((tmp_path / 'step3-target.json').read_text())
  assert record['made_from']['draft'] == texts.fingerprint(draft())
  assert record['made_from']['target'] == texts.fingerprint(TARGET)
  # Another draft, or other text, is another generation.
  written(tmp_path)(3, draft(1))
  second = stamp(tmp_path)
  assert second['step3-target.npz'] != first['step3-target.npz']
  other = written(tmp_path, tokens=2)(3, draft(1))[0][0]
  assert stamp(tmp_path)['step3-target.npz'] != second['step3-target.npz']
  assert (np.bincount(other.segments)[1:] <= 4).all()
  # And what is damaged is none.
  (tmp_path / 'step3-target.npz').write_bytes(b'')
  assert_same(written(tmp_path)(3, draft())[0][0], rows)


def test_what_the_target_writes_alone_serves_every_draft(tmp_path):
  rows = written(tmp_path / 'a')(0, draft())[0]
  kept = {*(tmp_path / 'a' / 'shared').iterdir()}
  assert len(kept) == 2 and not stamp(tmp_path / 'a')
  before = {path: path.stat().st_mtime_ns for path in kept}
  other = written(tmp_path / 'a', weight=1.0, refresh=5)
  # In the middle of it too: no draft has to be at hand.
  assert_same(other(4, draft(7))[0][0], rows[0])
  assert before == {path: path.stat().st_mtime_ns for path in kept}
  written(tmp_path / 'a', tokens=2)(0, draft())
  assert len({*(tmp_path / 'a' / 'shared').iterdir()}) == 4


def test_what_cannot_be_written_again_is_refused(tmp_path):
  with pytest.raises(ValueError, match='step 3.*no file.*step3-target.json'):
    written(tmp_path)(4, draft(4))
  written(tmp_path)(3, draft(3))
  written(tmp_path)(4, draft(4))
  with pytest.raises(ValueError, match='something else .tokens: 3 -> 2'):
    written(tmp_path, tokens=2)(4, draft(4))
  # A kill between two files leaves the record of what was there before.
  kept = (tmp_path / 'step3-target.json').read_bytes()
  written(tmp_path)(3, draft(9))
  (tmp_path / 'step3-target.json').write_bytes(kept)
  with pytest.raises(ValueError, match='not what its record says'):
    written(tmp_path)(4, draft(4))
  written(tmp_path)(3, draft(3))
  (tmp_path / 'step3-target.npz').write_bytes(b'PK')
  with pytest.raises(ValueError, match='damaged'):
    written(tmp_path)(4, draft(4))


def test_a_better_draft_takes_fewer_rounds_and_the_log_says_so(tmp_path):
  source = written(tmp_path, refresh=1, sequences=40, tokens=8, temperature=1.0)
  source(0, draft())
  source(1, ModelDrafter(TARGET, 2))
  source(1, ModelDrafter(TARGET, 2))
  lines = logs.read(tmp_path / 'log' / 'target.jsonl')
  assert [line['step'] for line in lines] == [0, 1]
  assert lines[0]['tokens_per_round'] < lines[1]['tokens_per_round'] <= 3
  assert lines[1]['tokens_per_round'] > 2  # 3 but for ends
  assert all(line['seconds'] > 0 for line in lines)


def test_all_generations_share_their_programs(tmp_path):
  batches = mixture(tmp_path)
  batches(0, draft())  # the target alone
  batches(3, draft(3))
  programs = generation.advance._cache_size(), generation._prefill._cache_size()
  for step in (6, 9):
    # An update by way of a restored target ties its results to a device.
    batches(step, jax.device_put(draft(step), jax.devices()[0]))
  assert programs == (
    generation.advance._cache_size(),
    generation._prefill._cache_size(),
  )


TX = optimizing.optimizer(0.1, 8, 1)


def train(folder, die_at=None):
  """Distils on all three sources; checkpoints lie between refreshes."""
  batches = mixture(folder / 'written')
  update = jax.jit(optimizing.make_step(distill.distill_loss, TX))
  weights = distill.objective(1.0)

  def step(i, model):
    if i == die_at:
      raise KeyboardInterrupt
    return batches(i, model)

  state = training.fit(
    optimizing.init(draft(), TX),
    lambda state, batch: update(state, TARGET, Batch(*batch), weights),
    step,
    lambda model: {'score': 0.0},
    steps=8,
    every=2,
    folder=folder / 'draft',
    log=folder / 'logs',
    meta={},
    score=lambda values: values['score'],
    like=data.described(4, WINDOW),
  )
  return state.model


@pytest.mark.slow
def test_training_on_its_own_text_goes_on_to_the_same_bits(tmp_path):
  straight = train(tmp_path / 'a')
  for die_at in (1, 3, 4, 5, 7):
    with pytest.raises(KeyboardInterrupt):
      train(tmp_path / 'b', die_at)
  assert Checkpoints(tmp_path / 'b' / 'draft').latest() == 6
  assert_same(train(tmp_path / 'b'), straight)
