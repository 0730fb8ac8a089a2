"""Replicas of several processes: memory, checkpoints, parameters of no module, clipping, and what mistakes say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.dtensor import jobs, training
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Workers]:
    with Workers(4, timeout_seconds=300) as workers:
        yield workers


def test_a_linear_too_large_for_one_process() -> None:
    with Workers(2, timeout_seconds=300) as workers:  # fresh ones: what others have left free would be used first
        for found in workers.run(jobs.large_linear, 2):
            assert found["too large"]
            assert found["made"] <= 1.15 * found["share"], found
            # With its gradient, which autograd copies once on its way to the parameter.
            assert found["trained"] <= 1.15 * 3 * found["share"], found
            assert found["losses"][1] < found["losses"][0]
            print({name: f"{value / 2**20:.1f} MiB" for name, value in found.items() if name in ("share", "made")})


def test_first_values_drawn_in_pieces_are_those_of_one_process(two_processes: Workers) -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Embedding(700, 52), nn.Linear(52, 44), nn.LayerNorm(44), nn.Linear(44, 3))
    for on_meta in (True, False):
        for found in two_processes.run(jobs.first_values, 2, on_meta, timeout_seconds=200):
            assert found.keys() == model.state_dict().keys()
            assert all(torch.equal(found[name], value) for name, value in model.state_dict().items()), on_meta


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_checkpoints_are_whole(kind: str, four_processes: Workers, two_processes: Workers, tmp_path: Path) -> None:
    """Saved over 1x4, restored over 2x2 and 1x2 and in one process; saved in one process, restored over 1x4."""
    path = str(tmp_path / "cut")
    saved = four_processes.run(jobs.save, kind, 4, path)
    assert all(equal(one, saved[0]) for one in saved)
    for workers, logical in ((four_processes, 2), (two_processes, 2)):
        for found in workers.run(jobs.restore, kind, logical, path):
            assert equal(found, saved[0])
    assert equal(jobs.restore(kind, 1, path), saved[0])
    gone_on = four_processes.run(jobs.go_on, kind, 4, path)
    plain = jobs.go_on(kind, 1, path)
    assert training.distance(gone_on[0], plain) < 1e-9
    whole = str(tmp_path / "whole")
    first = jobs.save(kind, 1, whole)
    for found in four_processes.run(jobs.restore, kind, 4, whole):
        assert equal(found, first)


def test_parameters_of_no_module(two_processes: Workers) -> None:
    first = nn.Parameter(torch.arange(32.0).reshape(4, 8).double() / 32)
    second = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    expected, sums = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = ((first @ torch.ones(8, dtype=torch.float64)) * second).square().sum()
        loss.backward()
        sums.append(float(first.grad.sum()))  # type: ignore[union-attr]
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses, seen, held, text in two_processes.run(jobs.bare_parameters, 2):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert [one[:2] for one in seen] == [((4, 8), (4, 8))] * 3
        assert [one[2] for one in seen] == pytest.approx(sums, rel=1e-12)
        assert held == 4 * 4 * 8
        assert "1 replica × 2 logical devices" in text
        assert "rank 1" in text


def test_gradients_are_clipped_by_the_norm_of_all_of_them(four_processes: Workers) -> None:
    """And ``zero_grad`` of the model reaches them: what is not forgotten would be in the second norm."""
    for initial, state, norms in four_processes.run(jobs.clipped, 4):
        expected, wanted = jobs.clipped_by_hand(initial)
        assert norms == pytest.approx(wanted, rel=1e-9)
        assert training.distance(state, expected) < 1e-9


@pytest.mark.parametrize("way", jobs.AVERAGES)
def test_averages_of_weights_that_are_cut(way: str, two_processes: Workers) -> None:
    plain = jobs.averaged(way, 1)
    for found in two_processes.run(jobs.averaged, way, 2):
        assert training.distance(found, plain) < 1e-10


def test_one_process_that_logs_a_sum_is_told_so(two_processes: Workers) -> None:
    for message in two_processes.run(jobs.logged_by_one):
        assert "no longer make the same calls" in message
        assert "sum on a tensor that is cut over logical devices" in message


def test_what_mistakes_say(two_processes: Workers) -> None:
    expected = {
        "hooked": r"UnsupportedError: Linear.weight \(16, 6\) is cut over logical devices and has a hook of its own",
        "other dtype": "ContextError: half was called outside of run with a variable that is cut",
        "copied": "nothing",
        "other rows": "ReplicaDivergenceError: run got other arguments on other logical devices",
        "other random numbers": "ReplicaDivergenceError: .* have drawn different random numbers in the last run",
        "changed outside": "ContextError: mul_ was called outside of run with a variable that is cut",
        "stepped outside": r"ContextError: Adam.step\(\) was called outside of run",
        "unknown optimizer": "UnsupportedError: Adafactor steps 6 parameters that are cut",
        "closure": r"UnsupportedError: SGD.step\(closure\)",
        "cut outside": r"ContextError: a tensor of shape \(4, 4\) was to be cut .* outside of run",
        "does not divide": "InvalidArgumentError: .* dimension 0 has size 3, which does not divide into 2",
        "other number of parts": "InvalidArgumentError: .* makes 4 parts, and a replica has 2 logical devices",
        "used outside": "ContextError: linear was called outside of run with a variable that is cut",
        "made into something outside": "ContextError: t was called outside of run with a variable that is cut",
        "gradient changed outside": "ContextError: mul_ was called outside of run with the gradient of a variable",
        "gradient used outside": "ContextError: linalg_vector_norm was called outside of run with the gradient",
        "hook on steps": "UnsupportedError: Adam has a hook on its steps",
        "hook in a step": "UnsupportedError: register_hook .* would last for this run only",
        "written to": "UnsupportedError: zero_ on a tensor that is cut over logical devices would change it in place",
        "written to with a graph": "UnsupportedError: mul_ .*; do it under torch.no_grad",
        "compiled": "^UnsupportedError: torch.compile of a function that works on tensors that are cut",
        "mapped": r"^UnsupportedError: linear on a tensor that is cut .* in a transform of torch.func",
        "scaled": "UnsupportedError: _amp_foreach_non_finite_check_and_unscale_ on a tensor that is cut",
        "nothing": "nothing",
    }
    for found in two_processes.run(jobs.mistakes, timeout_seconds=200):
        assert found.keys() == expected.keys()
        for name, pattern in expected.items():
            with pytest.raises(AssertionError, match=pattern):
                raise AssertionError(found[name])


def test_processes_that_do_not_make_whole_replicas(two_processes: Workers) -> None:
    for message in two_processes.run(jobs.odd_world):
        assert "logical_devices_per_replica=3" in message
        assert "there are 2 processes" in message
    with pytest.raises(InvalidArgumentError, match=r"=2 needs a process for each .*, and this process is alone; start"):
        ts.MirroredStrategy(logical_devices_per_replica=2)
    with pytest.raises(InvalidArgumentError, match=r"=2 needs a process for each .*, and this process is alone; start"):
        ts.MultiWorkerMirroredStrategy(logical_devices_per_replica=2)
    with pytest.raises(InvalidArgumentError, match=r"logical_devices_per_replica=0; the least is 1"):
        ts.MirroredStrategy(logical_devices_per_replica=0)
    with pytest.raises(WrongTypeError, match=r"must be an integer; got 2\.0"):
        ts.MirroredStrategy(logical_devices_per_replica=2.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"logical_mesh_shape=\[3\] has 3 places, and a replica has 2"):
        ts.MirroredStrategy(logical_devices_per_replica=2, logical_mesh_shape=[3])
