"""Prompt files in the layouts of public benchmarks."""

import gzip
import json

import hf_files
import pytest

from specjax import prompts, tokenizers

LAYOUTS = {
  'mt_bench': (
    {'question_id': 81, 'category': 'writing', 'turns': ['first', 'second']},
    ('mt_bench', 'first'),
  ),
  'spec_bench': (
    {'question_id': 1, 'category': 'rag', 'turns': ['ask'], 'reference': ['x']},
    ('rag', 'ask'),
  ),
  'gsm8k': (
    {'question': 'How many?', 'answer': '#### 4'},
    ('file', 'How many?'),
  ),
  'humaneval': (
    {'task_id': 'HumanEval/0', 'prompt': 'def f():', 'test': 'x'},
    ('file', 'def f():'),
  ),
  'own': ({'text': 'hello', 'task': 'math'}, ('math', 'hello')),
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('packed', [False, True])
def test_layouts(layout, packed, tmp_path):
  one, wanted = LAYOUTS[layout]
  path = tmp_path / f'file.jsonl{".gz" * packed}'
  lines = f'{json.dumps(one)}\n\n{json.dumps(one)}\n'.encode()
  path.write_bytes(gzip.compress(lines) if packed else lines)
  assert prompts.load(path) == [wanted, wanted]


@pytest.mark.parametrize(
  'text, message',
  [
    ('', 'has no prompts'),
    ('{"text": "a"}\n[1]', 'line 2 is no prompt: it has no object'),
    ('{"answer": "a"}', 'it has answer, and needs a text as turns or question'),
    ('{"text": ""}', 'line 1 is no prompt'),
    ('{"turns": []}', 'line 1 is no prompt'),
    ('{"text": 3}', 'line 1 is no prompt'),
    ('no json', 'line 1 is not JSON'),
  ],
)
def test_what_is_no_prompt_is_named(text, message, tmp_path):
  path = tmp_path / 'file.jsonl'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    prompts.load(path)


def test_files_that_cannot_be_read(tmp_path):
  with pytest.raises(FileNotFoundError, match='no file of prompts'):
    prompts.load(tmp_path / 'none.jsonl')
  for name in ('half.jsonl.gz', 'bytes.jsonl'):
    (tmp_path / name).write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ValueError, match='cannot be read'):
      prompts.load(tmp_path / name)


@pytest.mark.parametrize(
  ('line', 'wanted'),
  [
    # GSM8K as the authors of EAGLE have it, under a category of MT-Bench.
    ({'question_id': 7, 'category': 'math', 'turns': ['1 + 1']}, 'math'),
    ({'question_id': 107, 'category': 'math', 'turns': ['1']}, 'mt_bench'),
    ({'turns': None, 'question': 'why', 'prompt': None}, 'file'),
  ],
)
def test_a_task_is_not_taken_for_another(line, wanted, tmp_path):
  (tmp_path / 'file.jsonl').write_text(json.dumps(line))
  (found,) = prompts.load(tmp_path / 'file.jsonl')
  assert found.task == wanted


def test_some_of_each_task_evenly():
  every = [prompts.Prompt('a', f'{i}') for i in range(80)]
  every += [prompts.Prompt('b', 'x')]
  assert prompts.by_task(every, 4) == {'a': ['0', '20', '40', '60'], 'b': ['x']}


def test_a_question_is_a_chat_where_there_is_a_template():
  chat = hf_files.tokenizer()
  assert prompts.encode('x', chat) == chat.chat(
    [{'role': 'user', 'content': 'x'}]
  )
  begun = hf_files.tokenizer(template=None, start='<|im_start|>')
  assert prompts.encode('x', begun) == begun.start + begun.encode('x')
  assert prompts.encode('ab', tokenizers.Bytes()) == [97, 98]


def test_prompts_of_one_length_are_cut_across_texts():
  texts = [[1, 2], [3], [], [4, 5, 6, 7]]
  assert prompts.cut(iter(texts), 2, 3, 'it') == [[1, 2, 3], [4, 5, 6]]
  with pytest.raises(
    ValueError, match='it has 7 tokens, too few for 2 prompts'
  ):
    prompts.cut(texts, 2, 4, 'it')
