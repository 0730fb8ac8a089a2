"""One training on parameter servers whose workers are killed 200 times; called by ``./scripts/chaos``.

Each function adds 1 at its own place in three variables on two servers, every tenth one in two pushes. The workers kill
themselves (SIGKILL) at places drawn with ``--seed``, equally often in each phase of a worker's life, and log it before.
In the end every place has to hold exactly its number of pushes. Exits non-zero on any deviation, and then says which.

With ``--without-exactly-once`` the servers do not remember what they have applied; the same run has to fail.
"""

import argparse
import collections
import contextlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # every broken connection is a warning of torch's RPC
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import torchstrat as ts
from torchstrat.launch import LocalCluster
from torchstrat.launch.supervised import RestartPolicy
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.same_host.peers import SWITCH, why_not
from torchstrat.testing.fault_plan import FaultPlan, draw_kills

VARIABLES = 3
TWICE_EVERY = 10
PLACES_PER_KILL = 100
JOIN_SECONDS = 300.0
"""For a handful of functions of milliseconds: as long as all workers may be down at once, on a busy machine."""


@dataclass(frozen=True)
class Deviations:
    """Over all places of all variables, in additions."""

    lost: int
    duplicated: int
    stray: int


class Counters(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(VARIABLES))


def pushes_of(place: int) -> int:
    return 2 if place % TWICE_EVERY == TWICE_EVERY - 1 else 1


class Chaos:
    """The training and what happens to it."""

    def __init__(self, cluster: LocalCluster, plan: FaultPlan, workers: int, size: int) -> None:
        self._plan, self._workers = plan, workers
        self.size, self.functions = size, 0
        self.noticed: dict[int, float] = {}
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            self.model = model = Counters(size)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.strategy = strategy
        self.coordinator = coordinator = ts.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(lambda: torch.utils.data.DataLoader(range(1_000_000)))
        self._iterator = iter(data)

        def add_one(place, iterator):
            next(iterator)
            for _ in range(2 if place % 10 == 9 else 1):
                model.zero_grad()
                sum(-vector[place] for vector in model.vectors).backward()
                optimizer.step()
            return place

        self._add_one = add_one
        self._note_losses()

    def _note_losses(self) -> None:
        job = self.coordinator._job  # noqa: SLF001  # losses of workers are told to nobody else
        tell = job.on_worker_lost

        def lost(peer, reason):
            self.noticed.setdefault(peer.pid, time.time())
            tell(peer, reason)

        job.on_worker_lost = lost

    def run_some(self) -> None:
        """A few functions for each worker, to their end."""
        last = min(self.functions + 6 * self._workers, self.size)
        if last == self.functions:
            raise RuntimeError(f"all {self.size} places are used up and kills are left: some phase is not reached.")
        results = []
        while self.functions < last:
            results.append(
                self.coordinator.schedule(self._add_one, args=(self.functions, self._iterator), max_attempts=None)
            )
            self.functions += 1
        self.coordinator.join(JOIN_SECONDS)
        places = [int(place) for place in self.coordinator.fetch(results)]
        assert places == list(range(last - len(places), last)), f"results of other functions: {places}"

    def deviations(self) -> Deviations:
        """Of the values on the servers from what the functions should have made of them."""
        wanted = torch.tensor([float(pushes_of(place)) for place in range(self.functions)])
        lost = duplicated = stray = 0
        for vector in self.model.state_dict().values():
            difference = vector[: self.functions] - wanted
            lost += int((-difference).clamp(min=0).sum())
            duplicated += int(difference.clamp(min=0).sum())
            stray += int(vector[self.functions :].abs().sum())
        return Deviations(lost, duplicated, stray)


def main() -> int:
    options = arguments()
    kills = draw_kills(options.seed, options.kills, options.workers, most_functions=10, kinds=phases_here(options))
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = FaultPlan(folder / "plan", exactly_once=not options.without_exactly_once)
        for worker, faults in kills.items():
            plan.add("worker", worker, *faults)
        say("calls through " + ("torch.distributed.rpc" if options.rpc else "shared memory"))
        say(f"{options.kills} kills drawn with seed {options.seed}, {options.workers} workers, {options.ps} servers")
        output = stack.enter_context((folder / "cluster.log").open("w"))
        if options.rpc:
            os.environ[SWITCH] = "off"  # of this process, and of those that it starts
        cluster = LocalCluster(
            options.workers, options.ps, env=plan.environment, restart=RestartPolicy(first_delay_seconds=0.0)
        )
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            with cluster:
                return play(
                    Chaos(cluster, plan, options.workers, PLACES_PER_KILL * options.kills + 2000), plan, options
                )


def play(chaos: Chaos, plan: FaultPlan, options: argparse.Namespace) -> int:
    began, fired = time.monotonic(), 0
    while fired < options.kills or not all(is_back(plan, worker) for worker in range(options.workers)):
        chaos.run_some()
        before, fired = fired, sum(len(plan.fired("worker", worker)) for worker in range(options.workers))
        if fired // 20 != before // 20:
            say(f"  {fired} kills, {chaos.functions} functions, {time.monotonic() - began:.0f} s")
        if time.monotonic() - began > 60 * options.limit_minutes:
            say(f"FAILED: {fired} of {options.kills} kills within {options.limit_minutes:g} minutes")
            return 1
    seconds = time.monotonic() - began
    deviations = chaos.deviations()
    problems = check_kills(plan, options)
    report(chaos, plan, options, deviations, seconds)
    chaos.strategy.close()
    if deviations != Deviations(0, 0, 0):
        problems.append(f"values deviate: {deviations}")
    for problem in problems:
        say(f"FAILED: {problem}")
    return int(bool(problems))


def is_back(plan: FaultPlan, worker: int) -> bool:
    """Whether the worker's last process has run a function."""
    return plan.log("worker", worker)[-1:] != [] and plan.log("worker", worker)[-1].event == "first function"


def check_kills(plan: FaultPlan, options: argparse.Namespace) -> list[str]:
    """That what was planned has happened, each kill to a process of its own."""
    problems = []
    for worker in range(options.workers):
        log, fired = plan.log("worker", worker), plan.fired("worker", worker)
        if [line.fault for line in fired] != plan.planned("worker", worker):
            problems.append(f"worker {worker} did not die as planned")
        if len({line.pid for line in fired}) != len(fired):
            problems.append(f"a process of worker {worker} outlived its kill")
        if sum(line.event == "start" for line in log) != len(fired) + 1:
            problems.append(f"worker {worker} was started {sum(line.event == 'start' for line in log)} times")
    return problems


def report(chaos: Chaos, plan: FaultPlan, options: argparse.Namespace, deviations: Deviations, seconds: float) -> None:
    fired = [line for worker in range(options.workers) for line in plan.fired("worker", worker)]
    per_phase = collections.Counter(line.fault.phase for line in fired if line.fault)
    say("kills per phase: " + ", ".join(f"{phase} {per_phase[phase]}" for phase in phases_here(options)))
    say(f"functions: {chaos.functions} in {seconds:.0f} s")
    say(f"lost: {deviations.lost}; duplicated: {deviations.duplicated}; where nothing belongs: {deviations.stray}")
    noticed = [chaos.noticed[line.pid] - line.time for line in fired if line.pid in chaos.noticed]
    say_times("from kill to notice", noticed)
    from_kill, from_start = [], []
    for worker in range(options.workers):
        log = plan.log("worker", worker)
        for number, line in enumerate(log):
            if line.event == "first function":
                start = max(index for index in range(number) if log[index].event == "start")
                from_start.append(line.time - log[start].time)
                if start > 0:
                    from_kill.append(line.time - log[start - 1].time)
    say_times("from kill to the restarted worker's first function", from_kill)
    say_times("from a worker's process start to its first function", from_start)


def phases_here(options: argparse.Namespace) -> tuple[str, ...]:
    """In which workers are killed."""
    return phases.PHASES if options.rpc else (*phases.PHASES, phases.WRITING_GRADIENTS)


def say_times(what: str, seconds: list[float]) -> None:
    if seconds:
        say(f"{what}: median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s, of {len(seconds)}")


def say(line: str) -> None:
    print(line, file=sys.__stdout__, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="./scripts/chaos")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument(
        "--rpc", action="store_true", help="no shared memory, which is also the case where there is none"
    )
    parser.add_argument("--without-exactly-once", action="store_true", help="the run has to fail")
    parser.add_argument("--limit-minutes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="keep the plan, the workers' logs and their output here")
    options = parser.parse_args()
    options.rpc |= why_not() is not None
    if min(options.kills, options.workers, options.ps) < 1:
        parser.error("--kills, --workers and --ps have to be at least 1")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        if (options.folder / "plan").exists():
            parser.error(f"{options.folder} holds a run already")
    return options


if __name__ == "__main__":
    sys.exit(main())
