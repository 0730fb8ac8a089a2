"""Random programs come to the numbers of plain PyTorch in every place: 60 always, 2,000 in soak.

A failure is the shrunk program, as a script that runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.matrix.generated import PLACES, Runner, complaint, is_well_conditioned, plain, standalone
from tests.matrix.generator import Program, drawn, programs

SERVERS = "servers in memory"
REAL_SERVERS = "servers in processes"
LOGICAL = "two logical devices"
MAY_REFUSE = (SERVERS, REAL_SERVERS, LOGICAL)
"""Where an error of ours is an answer: closures, hooks on parameters, operators that are not proven and the like."""
ALWAYS = ("one_device", "mirrored x2", "mirrored x3", "central_storage x2", SERVERS)
OTHERS = tuple(place for place in PLACES if place not in ALWAYS and place != REAL_SERVERS)
COUNT, SOAK_COUNT, SOAK_PARTS = 60, 2000, 20


class Filter(NamedTuple):
    """A combination that is known to be wrong, with one program of it."""

    number: str
    cause: str
    matches: Callable[[Program, str], bool]
    pinned: Program
    place: str


def _has_idle(program: Program, place: str) -> bool:
    """Whether a replica sits an updating run out: shares are of the rows by the replicas, rounded up."""
    replicas = 3 if place.endswith("x3") else 2
    return any((replicas - 1) * -(-rows // replicas) >= rows for rows in program.rows[1::2])


IN_PROCESS = ("mirrored x2", "mirrored x3", "central_storage x2", "central_storage x3")
FILTERS = (
    Filter(
        "B54",
        "tensor hooks see the combined gradient, also those that torch.autograd.grad calls; what it returns is "
        "assigned and combined again, which a sum counts once for each replica",
        lambda program, place: (
            place not in ("one_device", *MAY_REFUSE)
            and {"summed", "by hand"} <= program.traits
            and "tensor hooks" in program.of["hook"]
        ),
        drawn(loss="sum", backward="autograd.grad", hook="tensor hooks that scale"),
        "mirrored x2",
    ),
)

ONCE_WRONG = {
    "a closure that assigns gradients of a sum": drawn(loss="sum", backward="autograd.grad", update="closure"),
    "evaluated several times": drawn(
        loss="sum", backward="autograd.grad", update="closure", optimizer="LBFGS", rows=(8, 7, 8)
    ),
    "by two optimizers": drawn(
        loss="sum", backward="autograd.grad", update="closure", groups="two optimizers", rows=(8, 7, 8)
    ),
    "a count in the graph when replicas meet": drawn(blocks=("counter",), loss="contrast"),
}
"""What drawn programs have shown and was repaired, by what it was about."""


def wrong_in(program: Program, place: str, runner: Runner) -> str:
    """Why the program is not what it is plainly; "" if it is, or is refused where it may be."""
    source = program.source
    wanted = plain(source)
    said = complaint(source, place, runner.run, wanted)
    if said.startswith("refused"):
        return "" if place in MAY_REFUSE else said
    if said.startswith("differs") and not is_well_conditioned(source, wanted):
        return ""
    return said


def explore(runner: Runner, count: int, seed: int, places: st.SearchStrategy[Sequence[str]]) -> None:
    """Draw programs, and raise what the simplest that fails has shown."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(programs(), places)
    def check(program: Program, places: Sequence[str]) -> None:
        for place in places:
            if not any(known.matches(program, place) for known in FILTERS):
                said = wrong_in(program, place, runner)
                assert not said, f"{place}: {said}\n\n{standalone(program.source, place)}"

    check()


@pytest.mark.deadline(900)  # most of it for shrinking, if there is something to shrink
@pytest.mark.parametrize("part", range(3))
def test_random_programs(part: int, runner: Runner) -> None:
    explore(runner, COUNT // 3, part, st.sampled_from(OTHERS).map(lambda other: (*ALWAYS, other)))


@pytest.mark.soak
@pytest.mark.deadline(1800)
@pytest.mark.parametrize("part", range(SOAK_PARTS))
def test_many_random_programs(part: int, runner: Runner) -> None:
    explore(runner, SOAK_COUNT // SOAK_PARTS, 1000 + part, st.just((*ALWAYS, *OTHERS)))


@pytest.mark.soak
@pytest.mark.deadline(1800)
def test_random_programs_on_servers_in_processes() -> None:
    with Runner(with_cluster=True) as runner:
        explore(runner, 60, 7, st.just((REAL_SERVERS,)))


@pytest.mark.parametrize("known", FILTERS, ids=lambda known: known.number)
def test_what_is_filtered_is_still_wrong(known: Filter, runner: Runner) -> None:
    assert known.matches(known.pinned, known.place)
    if not wrong_in(known.pinned, known.place, runner):
        pytest.fail(f"{known.number} no longer shows here: delete its filter")
    pytest.xfail(f"{known.number}: {known.cause}")


@pytest.mark.parametrize("name", ONCE_WRONG)
@pytest.mark.parametrize(
    "place", ["mirrored x2", "central_storage x3", "torchrun mirrored", "torchrun central_storage"]
)
def test_what_was_wrong_once(name: str, place: str, runner: Runner) -> None:
    assert not wrong_in(ONCE_WRONG[name], place, runner)


def test_a_wrong_program_is_shown_as_a_script(runner: Runner) -> None:
    known = FILTERS[0]
    script = standalone(known.pinned.source, known.place)
    compile(script, "program.py", "exec")
    assert 'if __name__ == "__main__":' in script
    assert PLACES[known.place].strategy in script
