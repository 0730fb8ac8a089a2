"""One warm training step, followed through the library: which of torchstrat's files and functions it runs.

::

    python scripts/trace_step.py                    # every path, a line for each role
    python scripts/trace_step.py servers --files    # and what of each file is called

A step is ``next`` of a distributed data set, ``run`` and ``reduce``; on parameter servers a scheduled function, and
``fetch`` of what it returns. A crossing is a call of a function by one of another file. Shown is the first process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

PATHS = {"in_process": 1, "mirrored": 2, "mirrored_sockets": 2, "central": 2, "central_sockets": 2, "servers": 1}
SCRIPTS = Path(__file__).resolve().parent


class Tracer:
    """A profile function of Python's. Counts while it is ``on``."""

    def __init__(self) -> None:
        self.on, self.calls, self.crossings = False, Counter[str](), 0
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and (file := _in_library(frame)):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.11 has the longer one
            self.calls[f"{file} {name}"] += 1
            self.crossings += frame.f_back is not None and _in_library(frame.f_back) not in ("", file)

    def facts(self) -> dict[str, Any]:
        return {"calls": dict(sorted(self.calls.items())), "crossings": self.crossings}


def _in_library(frame: FrameType) -> str:
    _, found, file = frame.f_code.co_filename.rpartition("/torchstrat/")
    return file if found else ""


def follow_when_told() -> None:
    """In the process of a role, and in its forks: begins, and ends, when a file says so, and leaves one each time."""
    tracer, folder = Tracer(), Path(os.environ["TRACE_STEP"])

    def watch() -> None:
        for kind in ("on", "off"):
            while not (folder / kind).exists():
                time.sleep(0.01)
            tracer.on = kind == "on"
            (folder / f"{os.getpid()}.partial").write_text(json.dumps(tracer.facts()))
            (folder / f"{os.getpid()}.partial").rename(folder / f"{os.getpid()}.{kind}")

    threading.Thread(target=watch, daemon=True).start()
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=watch, daemon=True).start())


def _tell(pids: dict[str, int], kind: str) -> dict[str, Any]:
    folder = Path(os.environ["TRACE_STEP"])
    (folder / kind).touch()
    while not all((folder / f"{pid}.{kind}").exists() for pid in pids.values()):  # `spawn` has a deadline
        time.sleep(0.01)
    return {role: json.loads((folder / f"{pid}.{kind}").read_text()) for role, pid in pids.items()}


def follow(path: str) -> dict[str, Any]:
    """In a process of the path: what was seen, by role."""
    tracer = Tracer()
    import torch

    import torchstrat as ts
    from torchstrat.launch import LocalCluster

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, pids = torch.ones(8, 8), dict[str, int]()
    with ExitStack() as stack:
        if path == "servers":
            cluster = stack.enter_context(LocalCluster(workers=1, ps=1))
            coordinator = ts.ClusterCoordinator(ts.ParameterServerStrategy(cluster.resolver))
            strategy: Any = coordinator.strategy
            pids = {"worker": cluster.process("worker", 0).pid, "server": cluster.process("ps", 0).pid}
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
        _tell(pids, "on")
        tracer.on = True
        step()
        tracer.on = False
        return {"coordinator" if pids else "replica": tracer.facts(), **_tell(pids, "off")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"any of {', '.join(PATHS)}; all where none is named")
    parser.add_argument("--files", action="store_true", help="the files, with the functions that are called in each")
    options = parser.parse_args()
    from torchstrat.testing import spawn

    print(f"{'path':<18}{'role':<13}{'files':>6}{'functions':>11}{'calls':>7}{'crossings':>11}")
    for path in options.paths or PATHS:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text("import trace_step; trace_step.follow_when_told()")
            env = {"TRACE_STEP": folder, "PYTHONPATH": f"{folder}:{SCRIPTS}:{SCRIPTS.parent}"}
            roles = spawn(follow, PATHS[path], (path,), timeout_seconds=300, env=env)[0]
        everywhere = {one.split()[0] for facts in roles.values() for one in facts["calls"]}
        for role, facts in roles.items():
            files = sorted({one.split()[0] for one in facts["calls"]})
            row = f"{len(facts['calls']):>11}{sum(facts['calls'].values()):>7}{facts['crossings']:>11}"
            print(f"{path:<18}{role:<13}{len(files):>6}{row}", flush=True)
            for file in files if options.files else ():
                print(f"    {file}: {', '.join(one.split()[1] for one in facts['calls'] if one.split()[0] == file)}")
        if len(roles) > 1:
            print(f"{path:<18}{'all':<13}{len(everywhere):>6}")


if __name__ == "__main__":
    main()
