"""What ./scripts/chaos draws, and how it judges what is left. That it notices is the point of each of these."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scripts.kills import drawing
from scripts.kills.drawing import ACTS, COORDINATOR, ROLES, SERVER, SERVER_PHASES, STARTING, WORKER, draw_lives, phases
from scripts.kills.ledger import Deviations, Ledger, State, judge, pushes_of

SIZE = 40
NONE = Deviations()


def values(*places: int, more: dict[int, float] | None = None, vectors: int = 3) -> list[np.ndarray]:
    """With all additions of these places, and others."""
    vector = np.zeros(SIZE, dtype=np.float32)
    for place in places:
        vector[place] += pushes_of(place)
    for place, count in (more or {}).items():
        vector[place] += count
    return [vector.copy() for _ in range(vectors)]


def ledger_with(*ended: int) -> Ledger:
    ledger = Ledger(SIZE)
    for place in ended:
        ledger.scheduled(place)
    ledger.ended(ended)
    return ledger


# -- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [ROLES, (WORKER,), (WORKER, SERVER), (COORDINATOR,)])
@pytest.mark.parametrize("kills", [1, 7, 300])
def test_so_many_kills_of_these_roles_in_all_their_phases_equally_often(roles: tuple[str, ...], kills: int) -> None:
    lives = draw_lives(3, kills, roles, 3, 2, phases.PHASES)
    count = drawing.planned(lives)
    assert sum(count.values()) == kills
    assert {role for role, _ in count} <= set(roles)
    kinds = {WORKER: phases.PHASES, SERVER: (*SERVER_PHASES, *ACTS), COORDINATOR: (*ACTS, STARTING)}
    for role in roles:
        of_role = [count[role, phase] for phase in kinds[role]]
        assert sum(of_role) == drawing.shared_out(kills, roles)[role]
        assert max(of_role) - min(of_role) <= 1
    assert [life.end is None for life in lives] == [False] * (len(lives) - 1) + [True]


def test_the_seed_decides() -> None:
    first, again, other = (draw_lives(seed, 60, ROLES, 3, 2, phases.PHASES) for seed in (0, 0, 1))
    assert first == again != other
    between = [drawing.acts_between(seed) for seed in (0, 0, 1)]
    first_acts, again_acts, other_acts = ([next(acts) for _ in range(100)] for acts in between)
    assert first_acts == again_acts != other_acts
    assert set(first_acts) == set(drawing.BETWEEN)


def test_no_process_of_a_worker_builds_more_often_than_it_can() -> None:
    lives = draw_lives(0, 300, (WORKER,), 3, 2, phases.PHASES)
    counts = Counter(
        f.count for life in lives for faults in life.faults.values() for f in faults if f.phase == phases.BUILDING
    )
    assert set(counts) == {1, 2}


# -- how it is judged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (values(0, 1, 9), NONE),
        (values(0, 9), Deviations(lost=3)),
        (values(0, 1, more={9: 1}), Deviations(lost=3)),
        (values(0, 1, 9, more={1: 1}), Deviations(duplicated=3)),
        (values(0, 1, 9, more={9: 2}), Deviations(duplicated=6)),
        (values(0, 1, 9, more={5: 1}), Deviations(stray=3)),
        ([*values(0, 1, 9, vectors=2), *values(0, 1, vectors=1)], Deviations(lost=2)),
        (values(0, 1, 9, more={1: 0.5}), Deviations(duplicated=3)),
    ],
)
def test_every_place_holds_its_pushes(found: list[np.ndarray], wanted: Deviations) -> None:
    ledger = ledger_with(0, 1, 9)
    assert ledger.look(found, 0.0, 3) == wanted
    assert ledger.look(found, 0.0, 3) == NONE, "a deviation counts once"
    assert ledger.deviations == wanted


def test_what_a_coordinator_that_died_had_running_may_be_there_or_not_and_never_twice() -> None:
    state = State(np.stack(values(0)), frozenset({1, 19}))
    for more in ({}, {1: 1}, {19: 1}, {19: 2, 1: 1}):
        assert judge(state, values(0, more=more)) == NONE
    assert judge(state, [*values(0, 1, vectors=1), *values(0, vectors=2)]) == NONE
    assert judge(state, values(0, more={19: 3})) == Deviations(duplicated=3)
    assert judge(state, values(0, more={2: 1})) == Deviations(stray=3)
    assert judge(state, values(1)) == Deviations(lost=3)


def test_after_a_restore_a_function_is_whole_or_missing() -> None:
    ledger = ledger_with(0)
    ledger.scheduled(1)
    ledger.scheduled(19)
    ledger.saving(7)
    ledger.saved(7)
    ledger.ended([1, 19])
    assert ledger.look(values(0, 1, 19), 0.0, 3) == NONE
    for found, wanted in [
        (values(0), NONE),
        (values(0, 19), NONE),
        (values(0, more={19: 1}), Deviations(lost=3)),
        ([*values(0, 19, vectors=2), *values(0, vectors=1)], Deviations(lost=2)),
        (values(0, 2), Deviations(stray=3)),
    ]:
        ledger.restoring()
        assert ledger.look(values(), 0.0, None) == NONE, "nothing is known meanwhile"
        ledger.restored(7)
        assert ledger.look(found, 0.0, int(np.count_nonzero(found[0]))) == wanted
    assert ledger.problems == []


def test_what_was_undone_is_done_again_and_nothing_else_is_handed_out_twice() -> None:
    ledger = ledger_with(0)
    ledger.saving(1)
    ledger.saved(1)
    ledger.scheduled(5)
    ledger.ended([5])
    ledger.restored(1)
    assert ledger.look(values(0), 0.0, 1) == NONE
    ledger.scheduled(5)
    assert ledger.problems == []
    ledger.scheduled(0)
    assert "place 0 was handed out again" in ledger.problems[0]


def test_the_newest_checkpoint_is_restored_and_the_dataset_knows_what_is_finished() -> None:
    ledger = ledger_with(0)
    for step in (1, 2):
        ledger.saving(step)
        ledger.saved(step)
    ledger.saving(3)  # it may be in place or not
    for step, told in [(3, 0), (2, 0), (1, 1), (9, 2)]:
        ledger.restored(step)
        assert len(ledger.problems) == told, ledger.problems
    ledger.restored(2)
    ledger.look(values(0), 0.0, 2)
    assert "the dataset has 2 finished rows, and 1 places" in ledger.problems[-1]


def test_the_side_variable_goes_back_alone() -> None:
    ledger = ledger_with(0)
    ledger.saving(1)
    ledger.saved(1)
    ledger.side_begins()
    ledger.scheduled(1)
    ledger.ended([1])
    ledger.side_went_back(1, 3)
    assert ledger.look(values(0, 1), 3.0, 2) == NONE
    ledger.saving(2)
    ledger.side_begins()
    assert ledger.look(values(0, 1), 17.0, None) == NONE, "in the middle of it"
    ledger.side_went_back(2, 3)
    assert ledger.look(values(0, 1), 5.0, 2) == Deviations(lost=1)
    assert ledger.look(values(0, 1), 5.0, 2) == NONE


def test_the_side_variable_is_known_again_from_what_is_there_at_rest() -> None:
    ledger = Ledger(2)
    ledger.saving(1)
    ledger.saved(1)
    ledger.side_begins()
    ledger.restored(1)
    ledger.side_begins()  # some of its functions may have come after that
    assert ledger.look([np.zeros(2)], 2.0, 0) == Deviations()
    assert ledger.look([np.zeros(2)], 3.0, 0) == Deviations(duplicated=1)
