"""Every program of the table in every place: plain PyTorch's numbers in float64, to 1e-10."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.matrix.generated import PLACES
from tests.programs import table
from tests.programs.running import Runner, complaint, missing, plain

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of libraries, when they are imported

PROGRAMS = table.load()
_shared: list[Runner] = []


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        _shared.append(runner)
        yield runner
        _shared.remove(runner)


@functools.cache
def _plain(name: str) -> dict[str, torch.Tensor]:
    return plain(PROGRAMS[name])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_plain_pytorch(name: str, place: str, runner: Runner) -> None:
    program = PROGRAMS[name]
    if library := missing(program):
        pytest.skip(f"{library} is not installed")
    runner.start()
    said = complaint(program, place, runner, _plain(name))
    assert not said, said
