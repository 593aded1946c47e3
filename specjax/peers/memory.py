"""The peak memory of one peer, in a process of its own.

    python -m specjax.peers.memory < request.json

is that process, which `measure` starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from specjax import peers, runs, weights
from specjax.comparison import OURS, Condition
from specjax.models import huggingface
from specjax.peers import own, transformers
from specjax.workspace import Workspace


def measure(
  name: str,
  folder: Path,
  dtype: str,
  prompt: Sequence[int],
  count: int,
  threads: int,
) -> int | None:
  """Bytes of a process that decodes plainly, interpreter and libraries too.

  Args:
    name: of a peer, to whom the target was exported with `peers.find`.
    folder: of the run.
    dtype: of weights and caches.
    prompt: token ids.
    count: new tokens.
    threads: of every pass.

  Returns:
    The most that it ever had; None where the system does not say.

  Raises:
    RuntimeError: the process failed.
  """
  request = {
    'name': name,
    'folder': str(folder),
    'dtype': dtype,
    'prompt': list(prompt),
    'count': count,
    'threads': threads,
  }
  # -P: the packages are those of this process, wherever it was started.
  done = subprocess.run(
    [sys.executable, '-P', '-m', __name__],
    input=json.dumps(request),
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    last = done.stderr.strip().rpartition('\n')[2]
    raise RuntimeError(f'{name} by itself: {last}')
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  """Decodes what was asked for; the last line says the memory in bytes."""
  request = json.load(sys.stdin)
  folder, dtype = Path(request['folder']), request['dtype']
  prompt, count = request['prompt'], request['count']
  if request['name'] == OURS:
    # What is packed already is not packed once more.
    decoder = own.Decoder(weights.pack(_target(folder, dtype), 1), {})
  else:
    peer, size = peers.OTHERS[request['name']], len(prompt) + count + 1
    decoder = peer.Decoder(peer.place(folder), dtype, request['threads'], size)
  plainly = Condition(dtype, 0, 1, 0.0, 1.0)
  decoder.arm(None, plainly)([prompt], 0, count, 0)
  print(json.dumps(_peak()))


def _target(folder, dtype):
  config = runs.complete(runs.read_config(folder / 'config.json'))
  if dtype == config['target']['dtype']:
    return Workspace(folder, config).target()
  # A copy beside the original would count too.
  return huggingface.load(transformers.place(folder), dtype)


def _peak() -> int | None:
  status = Path('/proc/self/status')
  if not status.exists():
    return None
  fields = dict(line.split(':', 1) for line in status.read_text().splitlines())
  return 1024 * int(fields['VmHWM'].split()[0])


if __name__ == '__main__':
  main()
