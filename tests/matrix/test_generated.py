"""Random programs come to the numbers of plain PyTorch in every place: 60 always, 2,000 in soak.

A failure is the shrunk program, as a script that runs alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.matrix.generated import PLACES, Runner, complaint, is_well_conditioned, plain, standalone
from tests.matrix.generator import Program, drawn, programs
from tests.matrix.places import TPU

SERVERS = "servers in memory"
REAL_SERVERS = "servers in processes"
LOGICAL = "two logical devices"
MAY_REFUSE = (SERVERS, REAL_SERVERS, LOGICAL, TPU)
"""Where an error of ours is an answer: closures, hooks on parameters, operators that are not proven and the like."""
ALWAYS = ("one_device", "mirrored x2", "mirrored x3", "central_storage x2", SERVERS)
OTHERS = tuple(place for place in PLACES if place not in ALWAYS and place != REAL_SERVERS)
COUNT, SOAK_COUNT, SOAK_PARTS = 60, 2000, 20


ONCE_WRONG_ON_TPU = {
    "weights set through data by replicas of which each has other rows": drawn(
        after="weights set through data", rows=(3, 5)
    ),
    "gradients with graphs that these differentiate": drawn(backward="create_graph", rows=(3, 5)),
    "steps in their backward passes": drawn(update="in hooks", rows=(3, 5)),
    "their closure for an optimizer of a class of one's own": drawn(
        update="closure", optimizer="Decaying", rows=(3, 5)
    ),
    "hooks of parameters that clamp what is differentiated by hand": drawn(
        backward="autograd.grad", hook="tensor hooks that clamp"
    ),
    "complex weights of an optimizer that is given a closure": drawn(
        blocks=("complex",), update="closure", optimizer="ASGD"
    ),
    "gradients assigned to a weight that lies in another order": drawn(
        blocks=("transposed",), backward="autograd.grad", optimizer="AdamW, fused"
    ),
    "spectra whose ends have no imaginary part": drawn(blocks=("spectrum",), optimizer="Rprop"),
    "one that wraps another": drawn(optimizer="Lookahead", rows=(3, 5)),
}
"""None of these is refused there."""

ONCE_WRONG = {
    "a closure that assigns gradients of a sum": drawn(loss="sum", backward="autograd.grad", update="closure"),
    "evaluated several times": drawn(
        loss="sum", backward="autograd.grad", update="closure", optimizer="LBFGS", rows=(8, 7, 8)
    ),
    "by two optimizers": drawn(
        loss="sum", backward="autograd.grad", update="closure", groups="two optimizers", rows=(8, 7, 8)
    ),
    "a count in the graph when replicas meet": drawn(blocks=("counter",), loss="contrast"),
    "a sum of gradients that hooks have been given": drawn(
        loss="sum", backward="autograd.grad", hook="tensor hooks that scale"
    ),
    "weights that leave common memory in a step that a replica sits out": drawn(
        after="weights as a vector", rows=(1, 8, 2)
    ),
    "gradients with graphs that not all replicas have": drawn(
        blocks=("experts",), backward="create_graph", rows=(3, 3, 4, 2)
    ),
    "gradients that hooks of some have been given": drawn(
        blocks=("experts",), backward="autograd.grad", hook="tensor hooks that clamp", rows=(3, 3, 4, 2)
    ),
    "assigned gradients that some replicas clip": drawn(
        blocks=("experts",), backward="autograd.grad", edit="clip by norm", rows=(3, 3, 4, 2)
    ),
    "weights of another optimizer that hooks of steps edit": drawn(
        stem="embedding", optimizer="Decaying", groups="two optimizers", after="weights clamped by step hooks"
    ),
    "an averaged layer that lists its parameters": drawn(
        blocks=("linear", "recurrent"), update="closure", after="average by hand", rows=(9, 1, 7)
    ),
    "such a sum after one that a step has used": drawn(
        loss="sum", backward="autograd.grad", hook="tensor hooks that scale", update="closure"
    ),
    "a sum that is zeroed in place in a step that a replica sits out": drawn(
        loss="sum", zero="in place", over="accumulated", rows=(2, 1, 2, 2)
    ),
    "hooks of steps that are called within another step": drawn(
        backward="autograd.grad", optimizer="Decaying", groups="two rates", after="weights clamped by step hooks"
    ),
    "a sum that is assigned after one that was zeroed in place": drawn(
        loss="sum", backward="autograd.grad", zero="in place", rows=(2, 1, 2, 2)
    ),
    "a wrapper's count after a step that a replica sits out": drawn(
        stem="padded embedding", edit="centre", optimizer="Lookahead", rows=(9, 1, 7, 7)
    ),
    **ONCE_WRONG_ON_TPU,
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


TURNS = (("mirrored x2", "torchrun central_storage"), ("central_storage x3", "torchrun mirrored"))
"""In every run a program is trained by every launch, and by the strategies in turn; by the others of them in soak."""


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(place, name, marks=[] if place in (*TURNS[number % 2], SERVERS, TPU) else pytest.mark.soak)
        for place in (*itertools.chain(*TURNS), SERVERS, TPU)
        for number, name in enumerate(ONCE_WRONG)
    ],
)
def test_what_was_wrong_once(name: str, place: str, runner: Runner) -> None:
    torch.optim.SGD([torch.empty(0)])  # from now on PyTorch's hooks are around its step
    assert not wrong_in(ONCE_WRONG[name], place, runner)


@pytest.mark.parametrize("name", ONCE_WRONG_ON_TPU)
def test_what_was_wrong_once_is_right_on_tpu(name: str, runner: Runner) -> None:
    source = ONCE_WRONG_ON_TPU[name].source
    assert not complaint(source, TPU, runner.run, plain(source))


def test_a_wrong_program_is_shown_as_a_script(runner: Runner) -> None:
    place = "mirrored x2"
    script = standalone(ONCE_WRONG["by two optimizers"].source, place)
    compile(script, "program.py", "exec")
    assert 'if __name__ == "__main__":' in script
    assert PLACES[place].strategy in script
