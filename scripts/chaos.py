"""One training on parameter servers whose processes are killed 300 times; called by ``./scripts/chaos``.

Each function adds 1 at its own place in three variables on two servers, every tenth one in two pushes. Processes die by
SIGKILL at moments drawn with ``--seed``, each role in all of its phases equally often (``--roles`` says which roles):

* workers kill themselves in each phase of a worker's life;
* servers kill themselves between a push and its answer, and while they write values, or are killed in the middle of
  what the coordinator does: while functions run or none does, while it saves (also beside functions), restores all or a
  part (``only=``), releases a model, or drops one whose functions run;
* the coordinator, a process of its own, dies in the middle of any of these, and while it starts; it is started again.

After a lost server all go back to the newest checkpoint by ``on_server_loss="restore"``, after a lost coordinator the
next one first looks what the last one has left, and then restores it. The places are rows of a leased dataset, which is
in the checkpoint: what is undone is done again. After each act every place has to hold exactly its number of pushes;
where a coordinator died, those of functions that were running may be missing, and after a restore each of them is whole
or missing. Exits non-zero on any deviation, and then says which; also where a kill did not happen, an older checkpoint
than the newest was restored, anything raised, or nothing happened for five minutes.

With ``--without-exactly-once`` the servers do not remember what they have applied; the same run has to fail.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # every broken connection is a warning of torch's RPC
os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.kills.coordinator import JOIN_SECONDS, UNAVAILABLE, Order, Setting, live
from scripts.kills.drawing import (
    ACTS,
    COORDINATOR,
    IDLE,
    ROLES,
    SERVER,
    SERVER_PHASES,
    STARTING,
    WORKER,
    Kill,
    Life,
    acts_between,
    draw_lives,
    planned,
)
from scripts.kills.ledger import Deviations, Ledger
from torchstrat.launch import LocalCluster
from torchstrat.launch.supervised import RestartPolicy
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.same_host.peers import SWITCH, why_not
from torchstrat.testing.fault_plan import FaultPlan, Line

PLACES_PER_KILL = 100
STARTS_IN_A_ROW = 20
"""Of a coordinator that servers do not let start."""
USUAL_CALLS = 2000
"""Of an act that was not seen yet."""


class FailedError(Exception):
    """The run cannot go on."""


@dataclass
class Seen:
    """What was killed from here, and what the coordinators said of it."""

    killed: dict[tuple[str, int], list[tuple[int, str]]] = field(default_factory=dict)
    """Of each task: which process, in which act."""
    noticed: dict[int, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=lambda: collections.defaultdict(lambda: USUAL_CALLS))
    starts: int = 0
    turned_away: int = 0

    def count(self) -> int:
        return sum(map(len, self.killed.values()))


class Coordinator:
    """Its process, and what it says; `play` gives it an act. What it does to the places, ``ledger`` learns."""

    def __init__(self, chaos: Chaos, starting: Kill | None) -> None:
        self._chaos, self._ledger, self._seen = chaos, chaos.ledger, chaos.seen
        self._pipe, others = multiprocessing.Pipe()
        self._seen.starts += 1
        setting = chaos.setting(life=self._seen.starts)
        order = self._order(STARTING, starting)
        self._process = CONTEXT.Process(target=live, args=(others, setting, order), name="coordinator")
        self._process.start()
        others.close()

    def starts(self) -> bool:
        """Whether it is there; False: it died on the way, as planned or since a server was lost."""
        return self._follow("started")

    def play(self, act: str, kill: Kill | None = None) -> bool:
        """Whether it lives after that."""
        self._chaos.note("plays", act, kill)
        self._pipe.send(self._order(act, kill))
        return self._follow("played")

    def close(self) -> None:
        self._pipe.send(None)
        if not self._follow("closed"):
            raise FailedError("the coordinator died while it closed the strategy")
        self._process.join(JOIN_SECONDS)

    def end(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.join(JOIN_SECONDS)

    def _order(self, act: str, kill: Kill | None) -> Order:
        if kill is None:
            return Order(act)
        return Order(act, 1 + int(kill.part * self._seen.calls[act]), (kill.role, kill.index))

    def _follow(self, until: str) -> bool:
        while True:
            if not self._pipe.poll(JOIN_SECONDS):
                raise FailedError(self._stuck(until))
            try:
                what, *about = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                return self._died(until)
            if what == until:
                return True
            self._take_in(what, *about)

    def _take_in(self, what: str, *about: Any) -> None:
        ledger = self._ledger
        takers: dict[str, Callable[..., object]] = {
            "scheduled": ledger.scheduled,
            "ended": ledger.ended,
            "saving": ledger.saving,
            "saved": ledger.saved,
            "restoring": ledger.restoring,
            "restored": ledger.restored,
            "side begins": ledger.side_begins,
            "side is": ledger.side_went_back,
            "values": self._look,
            "noticed": self._seen.noticed.setdefault,
            "calls": self._seen.calls.__setitem__,
            "kills": self._kill,
            "unavailable": lambda _: None,
            "failed": self._fail,
        }
        self._chaos.note(what, *about)
        takers[what](*about)

    def _fail(self, trace: str) -> None:
        raise FailedError(f"the coordinator raised\n{trace}")

    def _kill(self, role: str, index: int, act: str) -> None:
        chaos = self._chaos
        pid = chaos.kill_server(index) if role == SERVER else int(self._process.pid or 0)
        self._seen.killed.setdefault((role, index), []).append((pid, act))
        if role == SERVER:
            self._pipe.send("killed")

    def _look(self, values: Sequence[Any], side: float, finished: int | None, starts: tuple[int, ...]) -> None:
        if finished is None and starts != self._chaos.starts_at_last_look:
            self._ledger.restoring()  # the servers are others than those that the last coordinator knew
        found = self._ledger.look(values, side, finished)
        if finished is not None:
            self._chaos.starts_at_last_look = starts
        if found != Deviations():
            say(f"  {found} after {self._ledger.functions} functions")

    def _died(self, until: str) -> bool:
        self._process.join(JOIN_SECONDS)
        code = self._process.exitcode
        killed = self._process.pid in [pid for pid, _ in self._seen.killed.get((COORDINATOR, 0), ())]
        if code == -signal.SIGKILL and killed:
            return False
        if code == UNAVAILABLE and until == "started":
            self._seen.turned_away += 1
            return False
        raise FailedError(f"the coordinator ended with code {code} and had not {until}; see its log")

    def _stuck(self, until: str) -> str:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)  # the stacks of its threads, into its log
        self._process.join(1.0)
        return f"nothing was heard of the coordinator for {JOIN_SECONDS:g} s, and it had not {until}; see its log"


class Chaos:
    """The cluster, its coordinators one after the other, and what has become of the places."""

    def __init__(self, cluster: LocalCluster, plan: FaultPlan, options: argparse.Namespace, folder: Path) -> None:
        self._cluster, self._plan, self._options, self._folder = cluster, plan, options, folder
        self._size = PLACES_PER_KILL * options.kills + 2000
        self.ledger, self.seen = Ledger(self._size), Seen()
        self.starts_at_last_look: tuple[int, ...] = ()
        self._acts = acts_between(options.seed)
        self._journal = (folder / "journal").open("w")
        self._began, self._said = time.monotonic(), 0

    def setting(self, life: int) -> Setting:
        secrets = {name: value for name, value in os.environ.items() if name.startswith("TORCHSTRAT_")}
        spec, functions = self._cluster.cluster_spec.as_dict(), 6 * self._options.workers
        return Setting(spec, secrets, self._folder, self._size, self._options.ps, life, functions)

    def note(self, what: str, *about: object) -> None:
        """Into the folder, for whoever asks how it came to a deviation."""
        if what != "values":
            print(self.seen.starts, what, *about, file=self._journal, flush=True)

    def kill_server(self, index: int) -> int:
        """The process that was killed; one that has killed itself just now does not count."""
        while True:
            pid = self._cluster.process(SERVER, index).pid
            if pid in pids_of(self._plan.fired(SERVER, index)):
                self._cluster.wait_until_restarted(SERVER, index, pid, JOIN_SECONDS)
                continue
            return self._cluster.kill(SERVER, index)

    def play(self, lives: Sequence[Life]) -> None:
        """All lives, and in the last one all that is left."""
        self._add_faults(lives[0])
        coordinator = self._started(None)
        for number, life in enumerate(lives):
            for kill in life.kills:
                self._play(coordinator, next(self._acts))
                self._play(coordinator, kill.act, kill)
            while not self._have_died(life) or (life.end is None and not self._are_back()):
                self._play(coordinator, next(self._acts))
            if life.end is None:
                break
            # While the coordinator is away, or comes back, others die.
            self._add_faults(lives[number + 1])
            if life.end.act != STARTING:
                if coordinator.play(life.end.act, life.end):
                    raise FailedError(f"the coordinator outlived its kill {life.end.act}")
                coordinator = self._started(None)
            else:
                coordinator.end()  # which is not counted
                coordinator = self._started(life.end)
            self._say_how_far()
        self._play(coordinator, IDLE)
        coordinator.close()

    def _started(self, kill: Kill | None) -> Coordinator:
        for _ in range(STARTS_IN_A_ROW):
            before = self.seen.turned_away
            coordinator = Coordinator(self, kill)
            if coordinator.starts():
                return coordinator
            coordinator.end()
            if self.seen.turned_away == before:
                kill = None
        raise FailedError(f"{STARTS_IN_A_ROW} coordinators in a row did not start")

    def _play(self, coordinator: Coordinator, act: str, kill: Kill | None = None) -> None:
        if not coordinator.play(act, kill):
            raise FailedError(f"the coordinator died {act}, and was not to")
        self._say_how_far()

    def _add_faults(self, life: Life) -> None:
        for task, faults in life.faults.items():
            self._plan.add(*task, *faults)

    def _have_died(self, life: Life) -> bool:
        return all(len(self._plan.fired(*task)) == len(self._plan.planned(*task)) for task in life.faults)

    def _are_back(self) -> bool:
        """Whether the last process of each worker has run a function."""
        logs = (self._plan.log(WORKER, worker) for worker in range(self._options.workers))
        return all(log[-1:] != [] and log[-1].event == "first function" for log in logs)

    def _say_how_far(self) -> None:
        seconds = time.monotonic() - self._began
        kills = self.seen.count() + len(fired(self._plan, self._options))
        if kills // 20 != self._said // 20:
            say(f"  {kills} kills, {self.ledger.functions} functions, {seconds:.0f} s")
        self._said = kills
        if seconds > 60 * self._options.limit_minutes:
            raise FailedError(f"{kills} of {self._options.kills} kills within {self._options.limit_minutes:g} minutes")


def main() -> int:
    options = arguments()
    CONTEXT.set_forkserver_preload(["scripts.kills.coordinator"])
    lives = draw_lives(options.seed, options.kills, options.roles, options.workers, options.ps, worker_phases(options))
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = FaultPlan(folder / "plan", exactly_once=not options.without_exactly_once)
        say("calls through " + ("torch.distributed.rpc" if options.rpc else "shared memory"))
        say(
            f"{options.kills} kills of {', '.join(options.roles)} drawn with seed {options.seed}, "
            f"{options.workers} workers, {options.ps} servers"
        )
        output = stack.enter_context((folder / "cluster.log").open("w"))
        if options.rpc:
            os.environ[SWITCH] = "off"  # of this process, and of those that it starts
        cluster = LocalCluster(
            options.workers, options.ps, env=plan.environment, restart=RestartPolicy(first_delay_seconds=0.0)
        )
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output), cluster:
            return run(Chaos(cluster, plan, options, folder), lives, plan, options)


def run(chaos: Chaos, lives: Sequence[Life], plan: FaultPlan, options: argparse.Namespace) -> int:
    began, problems = time.monotonic(), []
    try:
        chaos.play(lives)
    except FailedError as error:
        problems.append(str(error))
    else:
        problems += check_kills(chaos.seen, lives, plan, options)
    report(chaos, plan, options, time.monotonic() - began)
    if chaos.ledger.deviations != Deviations():
        problems.append(f"values deviate: {chaos.ledger.deviations}")
    for problem in problems + chaos.ledger.problems:
        say(f"FAILED: {problem}")
    return int(bool(problems + chaos.ledger.problems))


def fired(plan: FaultPlan, options: argparse.Namespace) -> list[Line]:
    """By which processes have killed themselves."""
    return [line for task in tasks(options) for line in plan.fired(*task)]


def tasks(options: argparse.Namespace) -> list[tuple[str, int]]:
    return [*((WORKER, index) for index in range(options.workers)), *((SERVER, index) for index in range(options.ps))]


def pids_of(lines: Sequence[Line]) -> set[int]:
    return {line.pid for line in lines}


def check_kills(seen: Seen, lives: Sequence[Life], plan: FaultPlan, options: argparse.Namespace) -> list[str]:
    """That what was planned has happened, each kill to a process of its own."""
    problems = []
    for job, index in tasks(options):
        lines, from_here = plan.fired(job, index), seen.killed.get((job, index), [])
        if [line.fault for line in lines] != plan.planned(job, index):
            problems.append(f"{job} {index} did not die as planned")
        dead = pids_of(lines) | {pid for pid, _ in from_here}
        if len(dead) != len(lines) + len(from_here):
            problems.append(f"a process of {job} {index} outlived its kill")
        starts = sum(line.event == "start" for line in plan.log(job, index))
        if starts != len(dead) + 1:
            problems.append(f"{job} {index} was started {starts} times, and died {len(dead)} times")
    if (wanted := planned(lives)) != (happened := killed(seen, plan, options)):
        problems.append(f"planned kills that did not happen: {dict(wanted - happened)}; others: {happened - wanted}")
    return problems


def killed(seen: Seen, plan: FaultPlan, options: argparse.Namespace) -> collections.Counter[tuple[str, str]]:
    """Kills by role and phase, as they happened."""
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    for job, index in tasks(options):
        count.update((job, line.fault.phase) for line in plan.fired(job, index) if line.fault)
    for (role, _), deaths in seen.killed.items():
        count.update((role, act) for _, act in deaths)
    return count


def report(chaos: Chaos, plan: FaultPlan, options: argparse.Namespace, seconds: float) -> None:
    per_phase, deviations, seen = killed(chaos.seen, plan, options), chaos.ledger.deviations, chaos.seen
    say_phases("kills per phase", WORKER, worker_phases(options), per_phase)
    if SERVER in options.roles:
        say_phases("kills of servers", SERVER, (*SERVER_PHASES, *ACTS), per_phase)
    if COORDINATOR in options.roles:
        say_phases("kills of the coordinator", COORDINATOR, (*ACTS, STARTING), per_phase)
    say(
        f"coordinators: {seen.starts}; {chaos.ledger.left_behind} have looked at what the one before had left; "
        f"{seen.turned_away} ended since a server was lost while they started"
    )
    say(f"saved: {chaos.ledger.saves}; restored: {chaos.ledger.restores}")
    say(f"functions: {chaos.ledger.functions} in {seconds:.0f} s")
    say(f"lost: {deviations.lost}; duplicated: {deviations.duplicated}; where nothing belongs: {deviations.stray}")
    lines = [line for worker in range(options.workers) for line in plan.fired(WORKER, worker)]
    say_times("from kill to notice", [seen.noticed[line.pid] - line.time for line in lines if line.pid in seen.noticed])
    from_kill, from_start = [], []
    for worker in range(options.workers):
        log = plan.log(WORKER, worker)
        for number, line in enumerate(log):
            if line.event == "first function":
                start = max(index for index in range(number) if log[index].event == "start")
                from_start.append(line.time - log[start].time)
                if start > 0:
                    from_kill.append(line.time - log[start - 1].time)
    say_times("from kill to the restarted worker's first function", from_kill)
    say_times("from a worker's process start to its first function", from_start)


def say_phases(
    what: str, role: str, phases_of_role: Sequence[str], count: collections.Counter[tuple[str, str]]
) -> None:
    say(f"{what}: " + ", ".join(f"{phase} {count[role, phase]}" for phase in phases_of_role))


def worker_phases(options: argparse.Namespace) -> tuple[phases.Phase, ...]:
    """In which workers are killed."""
    return phases.PHASES if options.rpc else (*phases.PHASES, phases.WRITING_GRADIENTS)


def say_times(what: str, seconds: list[float]) -> None:
    if seconds:
        say(f"{what}: median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s, of {len(seconds)}")


def say(line: str) -> None:
    print(line, file=sys.__stdout__, flush=True)


def roles_of(text: str) -> tuple[str, ...]:
    given = text.split(",")
    if not given or not set(given) <= set(ROLES):
        raise argparse.ArgumentTypeError(f"{text!r}: name some of {','.join(ROLES)}")
    return tuple(role for role in ROLES if role in given)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="./scripts/chaos")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--roles", type=roles_of, default=ROLES, help=f"who is killed; {','.join(ROLES)} by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument(
        "--rpc", action="store_true", help="no shared memory, which is also the case where there is none"
    )
    parser.add_argument("--without-exactly-once", action="store_true", help="the run has to fail")
    parser.add_argument("--limit-minutes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="keep the plan, checkpoints, logs and output of all processes here")
    options = parser.parse_args()
    options.rpc |= why_not() is not None
    if min(options.kills, options.workers, options.ps) < 1:
        parser.error("--kills, --workers and --ps have to be at least 1")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        if (options.folder / "plan").exists():
            parser.error(f"{options.folder} holds a run already")
    return options


CONTEXT = multiprocessing.get_context("forkserver")
"""A coordinator is a fork of a process that has imported PyTorch and started no thread."""

if __name__ == "__main__":
    sys.exit(main())
