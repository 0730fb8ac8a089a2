"""Programs in processes of their own, as users start them: with this checkout, alone or under a launcher."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.patience import Patience

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable,)
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--standalone")
LAUNCH = (*PYTHON, "-m", "torchstrat.launch")
COMMAND = (
    *PYTHON,
    "-c",
    "import sys; from torchstrat.app.cli import main; sys.argv[0] = 'torchstrat'; sys.exit(main())",
)
"""``torchstrat``, which need not be installed."""

TRAIN = ROOT / "scripts" / "train.py"

SECONDS = 240.0
"""Below the deadline of a test, so that what the processes said is shown."""


def environment(**changes: str) -> dict[str, str]:
    """That of a user's shell: no launcher's variables, one thread, no GPU, and this checkout."""
    launchers = ("TORCHELASTIC_", "HYDRA_", "TORCHSTRAT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "COLUMNS": "200"}
    return {**kept, **own, **changes}


def run(
    *command: Any, cwd: Path | None = None, seconds: float = SECONDS, **changes: str
) -> subprocess.CompletedProcess[str]:
    """To its end, whatever that is."""
    words, place = [*map(str, command)], environment(**changes)
    return subprocess.run(words, cwd=cwd, env=place, capture_output=True, text=True, timeout=seconds, check=False)


def checked(finished: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return finished


def succeed(*command: Any, cwd: Path | None = None, **changes: Any) -> subprocess.CompletedProcess[str]:
    return checked(run(*command, cwd=cwd, **changes))


@contextlib.contextmanager
def started(*command: Any, cwd: Path | None = None, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """A program that runs, with both streams in one; it is ended where it has not ended by then."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*map(str, command)], cwd=cwd, env=environment(**changes), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


PRELOADED = [
    *("pytest", "torchstrat.launch.launcher", "torchstrat.app.train"),
    *("torch._dynamo", "sklearn.datasets", "matplotlib.pyplot", "torch.utils.tensorboard"),
]
"""The second line is what a training imports when it comes to it: an optimizer, the digits, a picture, event files."""


def fork(function: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """Call it in a fork of a process without threads that has imported what takes longer than most programs here."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    process = forks.Process(target=function, args=arguments)
    process.start()
    return process


def _script(words: list[str], folder: Path, streams: list[str], own: dict[str, str]) -> None:
    gc.freeze()  # a collection would otherwise go through all that was imported, and copy every page of it
    for number, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(own)
    sys.path[:0] = own["PYTHONPATH"].split(os.pathsep)
    multiprocessing.set_start_method(None, force=True)  # a data loader's workers are forks of it, not of nobody
    sys.argv, status = words, 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def scripts(
    folder: Path, *runs: tuple[list[Any], dict[str, str]], seconds: float = SECONDS
) -> list[subprocess.CompletedProcess[str]]:
    """Run programs with their words and variables, all at once and to their ends, each in a fork."""
    with contextlib.ExitStack() as stack:
        ends, processes = [], []
        for command, changes in runs:
            words, streams = [*map(str, command)], [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in "12"]
            process = fork(_script, words, folder, [stream.name for stream in streams], environment(**changes))
            stack.callback(process.kill)
            processes.append((words, process, streams))
        for words, process, streams in processes:
            process.join(seconds)
            out, err = (stream.read() for stream in streams)
            assert process.exitcode is not None, out + err
            ends.append(subprocess.CompletedProcess(words, process.exitcode, out, err))
    return ends


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``scripts/train.py`` to its end, whatever that is."""
    return scripts(folder, ([TRAIN, *overrides], {}))[0]


def trained(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return checked(train(folder, *overrides))


def free_ports(count: int) -> list[int]:
    """Below the range from which the system gives out ports by itself, so that nobody else is given them."""
    return list(itertools.islice(filter(_is_free, random.Random().sample(range(20000, 30000, 4), 100)), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def ranks(folder: Path, *overrides: str, program: Path = TRAIN) -> list[subprocess.CompletedProcess[str]]:
    """``scripts/train.py`` in two processes that meet, with the variables set by hand, as schedulers do."""
    return scripts(folder, *(([program, *overrides], variables) for variables in variables_of_ranks()))


def variables_of_ranks() -> list[dict[str, str]]:
    """What schedulers set by hand for two processes that meet."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def read_metrics(run: Path, event: str) -> list[dict[str, Any]]:
    """What a run recorded of these events, in order; nothing where there is no file yet."""
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
    return [record for record in records if record.pop("event") == event]


def wait_for(
    happens: Callable[[], Any], what: str, seconds: float = 120.0, progress: Callable[[], object] = lambda: None
) -> Any:
    """What ``happens()`` returns, once that is true. ``seconds``: also from each change of ``progress()`` on, which
    is in the error."""
    seen, patience = progress(), Patience(seconds)
    while not (result := happens()):
        if (found := progress()) != seen:
            seen, patience = found, Patience(seconds)
        assert not patience.is_over, f"for {seconds:g} s there has not been: {what}; last progress: {seen}"
        time.sleep(0.02)
    return result


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill_what_is_left(pids: Any) -> None:
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> dict[int, str]:
    """Process id → command of everything that was started by a process, directly or not."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands[child] for child in found - {pid} if child in commands}
