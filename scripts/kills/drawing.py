"""Which process dies when: drawn with a seed, all roles and phases in equal shares.

A run is a sequence of *lives* of the coordinator. In each, workers and servers kill themselves in their phases, servers
are killed beside what the coordinator does, and the coordinator ends the life, in the middle of an act of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchstrat.testing.fault_plan import Fault, Phase, phases

WORKER, SERVER, COORDINATOR = ROLES = ("worker", "ps", "coordinator")
SHARES: Mapping[str, int] = {WORKER: 2, SERVER: 2, COORDINATOR: 1}

# What the coordinator does in a round, beside functions on the workers or with none.
IDLE = "between functions"
RUNNING = "while functions run"
SAVING = "while saving"
SAVING_BESIDE = "while saving beside functions"
RESTORING = "while restoring"
RESTORING_A_PART = "while restoring a part"
RELEASING = "while releasing a model"
DROPPING = "while dropping a model in use"
STARTING = "while starting"
"""The coordinator alone: it connects, makes its variables, and restores the newest checkpoint."""
ACTS = (IDLE, RUNNING, SAVING, SAVING_BESIDE, RESTORING, RESTORING_A_PART, RELEASING, DROPPING)
BETWEEN = {**dict.fromkeys(ACTS[2:], 1), RUNNING: 6, SAVING_BESIDE: 2}
"""How often each is in rounds in which the coordinator kills nobody."""

SERVER_PHASES: tuple[Phase, ...] = (phases.APPLIED, phases.WRITING_VALUES)
MOST_FUNCTIONS = 10
"""From one kill of a worker to its next."""
MOST_PUSHES = 20
"""From one kill of a server, by itself, to its next."""


@dataclass(frozen=True)
class Kill:
    """Of a server, or the coordinator itself, when it has made this part of an act's calls."""

    role: str
    index: int
    act: str
    part: float


@dataclass(frozen=True)
class Life:
    """One process of the coordinator. ``faults``: of workers and servers, by themselves. ``end``: None for the last."""

    faults: Mapping[tuple[str, int], Sequence[Fault]] = field(default_factory=dict)
    kills: Sequence[Kill] = ()
    end: Kill | None = None


def shared_out(kills: int, roles: Sequence[str]) -> dict[str, int]:
    """So many kills for each role, by `SHARES`; what is left over goes to the first ones."""
    whole = sum(SHARES[role] for role in roles)
    shares = {role: kills * SHARES[role] // whole for role in roles}
    for role in roles[: kills - sum(shares.values())]:
        shares[role] += 1
    return shares


def draw_lives(
    seed: int, kills: int, roles: Sequence[str], workers: int, servers: int, worker_phases: Sequence[Phase]
) -> list[Life]:
    """All kills of a run, in the order of the coordinator's lives."""
    draw = random.Random(seed)
    shares = shared_out(kills, roles)
    ends = _in_turn(draw, (*ACTS, STARTING), shares.get(COORDINATOR, 0))
    lives = len(ends) + 1
    faults: list[dict[tuple[str, int], list[Fault]]] = [{} for _ in range(lives)]
    beside: list[list[Kill]] = [[] for _ in range(lives)]
    for number, phase in enumerate(_in_turn(draw, worker_phases, shares.get(WORKER, 0))):
        # A process builds its dataset and the iterator over it once.
        fault = Fault(phase, draw.randint(1, 2 if phase == phases.BUILDING else MOST_FUNCTIONS))
        faults[number % lives].setdefault((WORKER, number // lives % workers), []).append(fault)
    kinds = (*SERVER_PHASES, *ACTS)
    for number, kind in enumerate(_in_turn(draw, kinds, shares.get(SERVER, 0))):
        index = draw.randrange(servers)
        if kind in SERVER_PHASES:
            fault = Fault(kind, draw.randint(1, MOST_PUSHES))  # type: ignore[arg-type]
            faults[number % lives].setdefault((SERVER, index), []).append(fault)
        else:
            beside[number % lives].append(Kill(SERVER, index, kind, draw.random()))
    return [
        Life(
            faults[number], beside[number], Kill(COORDINATOR, 0, ends[number], draw.random()) if ends[number:] else None
        )
        for number in range(lives)
    ]


def acts_between(seed: int) -> Iterator[str]:
    """What the coordinator does in the rounds in which it kills nobody, without end."""
    draw = random.Random(f"between {seed}")
    while True:
        yield from draw.choices([*BETWEEN], [*BETWEEN.values()])


def planned(lives: Sequence[Life]) -> Counter[tuple[str, str]]:
    """Kills by role and phase."""
    count: Counter[tuple[str, str]] = Counter()
    for life in lives:
        count.update((role, fault.phase) for (role, _), faults in life.faults.items() for fault in faults)
        count.update((kill.role, kill.act) for kill in (*life.kills, *((life.end,) if life.end else ())))
    return count


def _in_turn(draw: random.Random, kinds: Sequence[str], count: int) -> list[str]:
    """Each kind equally often, in any order."""
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(drawn)
    return drawn
