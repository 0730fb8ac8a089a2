"""One warm training step, followed through the library: which of torchstrat's files and functions it runs.

::

    python scripts/trace_step.py                    # every path, a line for each role
    python scripts/trace_step.py servers --files    # and what of each file is called

A step is ``next`` of a distributed data set, ``run`` and ``reduce``; on parameter servers a scheduled function, and
``fetch`` of what it returns. A crossing is a call of a function by one of another file. Shown is the first process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

PATHS = {"in_process": 1, "mirrored": 2, "mirrored_sockets": 2, "central": 2, "central_sockets": 2, "servers": 1}
SCRIPTS = Path(__file__).resolve().parent


def trace(frame: FrameType, event: str, _: object) -> None:
    """A profile function: a line for each call, in the file with this process's number, where there is one."""
    if event == "call" and (file := _in_library(frame)):
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.11 has the longer one
        crosses = frame.f_back is not None and _in_library(frame.f_back) not in ("", file)
        with suppress(FileNotFoundError):
            lines = os.open(f"{os.environ['TRACE_STEP']}/{os.getpid()}", os.O_WRONLY | os.O_APPEND)
            os.write(lines, f"{file} {name} {crosses:d}\n".encode())
            os.close(lines)


def _in_library(frame: FrameType) -> str:
    _, found, file = frame.f_code.co_filename.rpartition("/torchstrat/")
    return file if found else ""


def begin() -> None:
    threading.setprofile(trace)
    sys.setprofile(trace)


def follow(path: str) -> dict[str, list[str]]:
    """In a process of the path: the calls that were seen, by role."""
    begin()
    import torch

    import torchstrat as ts
    from torchstrat.launch import LocalCluster

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, pids = torch.ones(8, 8), {"replica": os.getpid()}
    with ExitStack() as stack:
        if path == "servers":
            cluster = stack.enter_context(LocalCluster(workers=1, ps=1))
            coordinator = ts.ClusterCoordinator(ts.ParameterServerStrategy(cluster.resolver))
            strategy: Any = coordinator.strategy
            pids = {"coordinator": os.getpid()}
            pids |= {"worker": cluster.process("worker", 0).pid, "server": cluster.process("ps", 0).pid}
            step = lambda: coordinator.fetch(coordinator.schedule(train_step, args=(x,)))  # noqa: E731
        else:
            kind: Any = ts.CentralStorageStrategy if path.startswith("central") else ts.MirroredStrategy
            how = {"collectives": "process_group"} if path.endswith("sockets") else {}
            strategy = kind(["cpu:0", "cpu:1"] if path == "in_process" else ["cpu:0"], **how)
            batches = iter(strategy.distribute_dataset([x] * 10))
            step = lambda: strategy.reduce("mean", strategy.run(train_step, args=(next(batches),)), axis=None)  # noqa: E731
        stack.callback(strategy.close)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(5):
            step()
        files = {role: Path(os.environ["TRACE_STEP"], str(pid)) for role, pid in pids.items()}
        for file in files.values():
            file.touch()
        step()
        return {role: file.rename(file.with_suffix(".seen")).read_text().splitlines() for role, file in files.items()}


def show(path: str, roles: dict[str, list[str]], *, with_files: bool) -> None:
    seen = {role: {line.split()[0] for line in lines} for role, lines in roles.items()}
    for role, lines in roles.items():
        counts = len({line[:-2] for line in lines}), len(lines), sum(line[-1] == "1" for line in lines)
        print(f"{path:<18}{role:<13}{len(seen[role]):>6}{counts[0]:>11}{counts[1]:>7}{counts[2]:>11}", flush=True)
        for file in sorted(seen[role]) if with_files else ():
            names = {line.split()[1] for line in lines if line.startswith(f"{file} ")}
            print(f"    {file}: {', '.join(sorted(names))}")
    if len(roles) > 1:
        print(f"{path:<18}{'all':<13}{len(set().union(*seen.values())):>6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"any of {', '.join(PATHS)}; all where none is named")
    parser.add_argument("--files", action="store_true", help="the files, with the functions that are called in each")
    options = parser.parse_args()
    from torchstrat.testing import spawn

    print(f"{'path':<18}{'role':<13}{'files':>6}{'functions':>11}{'calls':>7}{'crossings':>11}")
    for path in options.paths or PATHS:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text("import trace_step; trace_step.begin()")
            env = {"TRACE_STEP": folder, "PYTHONPATH": f"{folder}:{SCRIPTS}:{SCRIPTS.parent}"}
            show(path, spawn(follow, PATHS[path], (path,), timeout_seconds=300, env=env)[0], with_files=options.files)


if __name__ == "__main__":
    main()
