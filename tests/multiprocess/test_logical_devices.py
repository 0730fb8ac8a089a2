"""Replicas of several processes: numbers, bytes, memory, checkpoints, programs, and what mistakes say."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.dtensor import jobs, loaded_states, programs, proving, training
from tests.dtensor.operator_cases import CASES, PROVEN_ELSEWHERE
from tests.dtensor.operator_list import DOCUMENT, text
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.dtensor.cut_tensors import CutTensor
from torchstrat.sharding.dtensor.operators import operators
from torchstrat.sharding.dtensor.parameters import CutVariables
from torchstrat.sharding.grid import Sharding
from torchstrat.testing import Workers, contract
from torchstrat.testing import training as testing

pytestmark = pytest.mark.multiprocess

DTYPES = ["float32", "float64"]
LOSSES = {"float32": 1e-6, "float64": 1e-9}
PARAMETERS = {"float32": 1e-5, "float64": 1e-9}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Workers]:
    with Workers(4, timeout_seconds=300) as workers:
        yield workers


# -- training ------------------------------------------------------------------------------------------------------


def check(outcomes: list[dict[tuple[str, str], training.Outcome]], replicas: int) -> None:
    for (kind, dtype), first in outcomes[0].items():
        losses, state, last = training.train_by_hand(kind, first.initial, replicas)
        for of_rank in outcomes:
            found = of_rank[kind, dtype]
            assert found.losses == pytest.approx(losses, abs=LOSSES[dtype]), kind
            assert training.distance(found.state, state) < PARAMETERS[dtype], kind
            # Adam makes as much of the rounding of a single row's gradients as of the gradients.
            assert training.distance(found.last, last) < 10 * PARAMETERS[dtype], kind
            assert all(torch.equal(one, found.state[name]) for name, one in first.state.items()), kind
        assert losses[-1] != losses[0], kind
        assert training.distance(state, first.initial) > 0.01, kind  # there was something to be wrong about


@pytest.mark.deadline(400)
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.soak)])  # the next has both
def test_two_replicas_of_two_logical_devices(dtype: str, four_processes: Workers) -> None:
    check(four_processes.run(training.train_all, [*training.KINDS], 2, [dtype]), replicas=2)


@pytest.mark.deadline(400)
def test_four_logical_devices(four_processes: Workers) -> None:
    outcomes = four_processes.run(training.train_all, [*training.KINDS], 4, DTYPES)
    check(outcomes, replicas=1)
    kinds = outcomes[0]["mlp", "float32"].kinds
    cut = {"1.weight", "1.bias", "3.weight", "5.weight", "5.bias", "7.weight"}
    assert {name for name, kind in kinds.items() if kind == "CutTensor"} == cut
    # By hand: layers are 6 → 16 → 12 → 8 → 4, of which 16 and 8 are cut. Forward, the two layers behind these add up
    # their outputs, 12 and 4 wide; backward, the layer 12 → 8 adds up the gradient of its input, and the first needs
    # none. A sum of n bytes over 4 processes makes each send 2 n 3 / 4.
    for dtype, item_bytes in (("float32", 4), ("float64", 8)):
        expected = 2 * training.ROWS * (12 + 4 + 12) * item_bytes * 3 // 4
        for of_rank in outcomes:
            assert of_rank["mlp", dtype].sent_bytes[: training.STEPS] == [expected] * training.STEPS


def test_programs_give_the_numbers_of_one_process(two_processes: Workers) -> None:
    names = [*programs.PROGRAMS]
    expected = loaded_states.run_all(1, names)
    for found in two_processes.run(loaded_states.run_all, 2, names, timeout_seconds=200):
        for name, (seen, state) in expected.items():
            same(found[name][0], seen, name)
            same([*found[name][1].values()], [*state.values()], name)


def test_who_reads_what_state_dict_gave_before_steps_is_told_once(two_processes: Workers) -> None:
    assert loaded_states.read_late(1) == ([], True)
    for said, is_plain in two_processes.run(loaded_states.read_late, 2):
        assert is_plain
        assert len(said) == 1
        assert re.search(r"shape \(8, 6\) that state_dict\(\) has returned.*read after steps.*copy.deepcopy", said[0])


def test_who_writes_to_what_state_dict_gave_before_steps_is_refused(two_processes: Workers) -> None:
    assert loaded_states.write_late(1) == ["", "", ""]
    for written, viewed, array in two_processes.run(loaded_states.write_late, 2):
        for said in (written, viewed):
            assert re.search(r"written to a tensor that state_dict\(\) has returned.*steps have changed", said)
        assert "read-only" in array


def test_what_no_backward_pass_has_combined_is_clipped_as_on_one_device(four_processes: Workers) -> None:
    norms, state = jobs.clipped(1)
    for found_norms, found in four_processes.run(jobs.clipped, 2):
        same([*found_norms, *found.values()], [*norms, *state.values()], "clipped")


def test_what_replicas_change_of_an_optimizers_state_is_the_first_ones(four_processes: Workers) -> None:
    expected = jobs.edited_states(1)
    for found in four_processes.run(jobs.edited_states, 2):
        assert found.keys() == expected.keys()
        same([*found.values()], [*expected.values()], "edited")


def test_optimizers_that_have_drifted_apart_are_found(four_processes: Workers) -> None:
    for said in four_processes.run(jobs.drifted, 2):
        assert re.search("state exp_avg of parameter .* of Adam.* is not the same on all replicas", said)


def same(found: list[Any], expected: list[Any], name: str) -> None:
    assert len(found) == len(expected), name
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            tolerance = TOLERANCES.get(other.dtype, 1e-9)
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")
        else:
            assert one == other, name


# -- memory and checkpoints ----------------------------------------------------------------------------------------


def test_a_linear_too_large_for_one_process() -> None:
    with Workers(2, timeout_seconds=300) as workers:  # fresh ones: what others have left free would be used first
        for found in workers.run(jobs.large_linear, 2):
            assert found["too large"]
            assert found["made"] <= 1.15 * found["share"], found
            # With its gradient, which autograd copies once on its way to the parameter.
            assert found["trained"] <= 1.15 * 3 * found["share"], found
            assert found["losses"][1] < found["losses"][0]


def test_first_values_drawn_in_pieces_are_those_of_one_process(two_processes: Workers) -> None:
    expected = jobs.layers_of_many_kinds().state_dict()
    for on_meta in (True, False):
        for found in two_processes.run(jobs.first_values, 2, on_meta, timeout_seconds=200):
            assert equal(found, expected), on_meta


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", ["mlp", pytest.param("transformer", marks=pytest.mark.soak)])
def test_checkpoints_are_whole(kind: str, four_processes: Workers, two_processes: Workers, tmp_path: Path) -> None:
    """Saved over 1x4, restored over 2x2 and 1x2 and in one process; saved in one process, restored over 1x4."""
    cut, whole = str(tmp_path / "cut"), str(tmp_path / "whole")
    saved = four_processes.run(jobs.trained, kind, 4, 3, "", cut)
    restored = [jobs.trained(kind, 1, 0, cut)]
    for workers in (four_processes, two_processes):
        restored += workers.run(jobs.trained, kind, 2, 0, cut)
    assert all(equal(one, saved[0]) for one in (*saved, *restored))
    gone_on = four_processes.run(jobs.trained, kind, 4, 3, cut)
    assert training.distance(gone_on[0], jobs.trained(kind, 1, 3, cut)) < 1e-9
    first = jobs.trained(kind, 1, 3, "", whole)
    assert all(equal(found, first) for found in four_processes.run(jobs.trained, kind, 4, 0, whole))


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_what_mistakes_say(two_processes: Workers) -> None:
    for found in two_processes.run(jobs.said_of_mistakes, timeout_seconds=200):
        assert found.keys() == jobs.MISTAKES.keys()
        wrong = {name: said for name, said in found.items() if not re.search(jobs.MISTAKES[name][0], said)}
        assert not wrong


def test_processes_that_do_not_make_whole_replicas(two_processes: Workers) -> None:
    for message in two_processes.run(jobs.odd_world):
        assert "logical_devices_per_replica=3" in message
        assert "there are 2 processes" in message


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        *(
            (
                make,
                {"logical_devices_per_replica": 2},
                InvalidArgumentError,
                "=2 needs a process for each .* is alone; start",
            )
            for make in (ts.MirroredStrategy, ts.MultiWorkerMirroredStrategy)
        ),
        (ts.MirroredStrategy, {"logical_devices_per_replica": 0}, InvalidArgumentError, "=0; the least is 1"),
        (ts.MirroredStrategy, {"logical_devices_per_replica": 2.0}, WrongTypeError, r"must be an integer; got 2\.0"),
        (
            ts.MirroredStrategy,
            {"logical_devices_per_replica": 2, "logical_mesh_shape": [3]},
            InvalidArgumentError,
            r"logical_mesh_shape=\[3\] has 3 places, and a replica has 2",
        ),
    ],
)
def test_numbers_of_logical_devices(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


# == every operator on tensors that are cut equals plain PyTorch, however they are cut ===============================

OPERATORS = [case.name for case in CASES]
PARTS_OF_OPERATORS = [OPERATORS[start::6] for start in range(6)]


def test_every_operator_has_a_case() -> None:
    assert len(set(OPERATORS)) == len(OPERATORS)
    assert {operator for case in CASES for operator in case.operators} | set(PROVEN_ELSEWHERE) == set(operators())


def check_proofs(proofs: list[list[proving.Proof]], names: list[str]) -> None:
    assert [proof.case for proof in proofs[0]] == [name for name in OPERATORS if name in names]
    for of_rank in proofs:
        for proof in of_rank:
            assert not proof.failures, proof
            assert proof.proven, proof
        assert [proof[:3] for proof in of_rank] == [proof[:3] for proof in proofs[0]]


@pytest.mark.parametrize("part", range(len(PARTS_OF_OPERATORS)))
@pytest.mark.parametrize(
    ("logical", "seeds", "ways", "enough"),
    [
        (2, 1, 4, math.inf),
        pytest.param(2, 3, 6, math.inf, marks=pytest.mark.soak),  # more of the same
        # Of fewer shapes, some operator can be cut in none of the ways.
        pytest.param(4, 3, 3, 2, marks=pytest.mark.soak),
        pytest.param(4, 6, 24, math.inf, marks=[pytest.mark.soak, pytest.mark.deadline(400)]),
    ],
)
def test_operators(
    logical: int, seeds: int, ways: int, enough: float, part: int, two_processes: Workers, four_processes: Workers
) -> None:
    workers, names = two_processes if logical == 2 else four_processes, PARTS_OF_OPERATORS[part]
    check_proofs(workers.run(proving.prove, names, logical, seeds, ways, enough, timeout_seconds=300), names)


def test_the_list_in_the_docs_is_of_these_cases() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == text(), "run python -m tests.dtensor.operator_list"


def test_everything_else_raises(two_processes: Workers) -> None:
    for messages in two_processes.run(proving.refusals):
        assert set(messages) == {*proving.REFUSED, *proving.RAISED_BY_PLAIN}
        whole = torch.rand(4, 4)
        for name, function in proving.RAISED_BY_PLAIN.items():
            with pytest.raises(Exception) as raised:  # of the same class
                function(whole)
            assert messages.pop(name) == type(raised.value).__name__, name
        for name, message in messages.items():
            assert name in message, message
            assert "replicate_to_logical_devices" in message, message
            assert "split" in message or "cut over logical devices" in message, message


CONTROLS = {
    # what is broken → a case that has to fail then
    "sums going backward": "linear without bias",
    "sums going forward": "softmax",
    "neighbours' rows": "conv2d",
    "which part is whose": "embedding",
    "dimensions made whole": "places in an order",
    "random numbers": "dropout",
}


@pytest.mark.parametrize("broken", CONTROLS)
def test_a_broken_rule_is_noticed(broken: str, two_processes: Workers) -> None:
    of_ranks = two_processes.run(proving.prove, [CONTROLS[broken]], 2, 4, 12, math.inf, broken)
    assert all(proofs[0].failures for proofs in of_ranks), of_ranks  # unbroken it has none: `test_operators`


# == every training case with two replicas of two processes each ===================================================

RAISE_WHERE_CUT = {
    # optimizers, and what is done to gradients
    *("adafactor", "third_party_optimizer", "sparse_adam", "lbfgs", "lbfgs_strong_wolfe", "closure_of_sgd"),
    *("gradient_noise_drawn_in_step", "grad_scaler", "grad_scaler_overflow", "grad_scaler_clip_overflow"),
    *("grad_scaler_updated_between_steps", "group_removed", "moving_average_under_autograd"),
    *(name for name in contract.CASES if "_remade_in_a_module" in name),  # whose trainer has a scaler
    *("states_in_a_chain", "several_in_one"),
    *("tensor_hooks", "assigned_gradients", "assigned_gradients_in_place", "func_grad"),
    # writing to parameters outside of runs, copying and replacing them
    *("moving_average_outside", "averaged_model_outside", "deepcopy_in_step", "deepcopy_kept_between_steps"),
    *("assigned_state_dict", "pruned_half_way", "pruned_for_a_while", "edited_between_steps"),
    *("evaluated_between_steps", "elements_set_aside", "elements_exchanged_outside"),
    # operators
    *("lstm", "transformer_encoder", "weight_norm", "blocks_over_the_whole_step", "channels_last", "compiled"),
    *("torch_script", "traced"),
    # variables made in a run, which are cut after it only: the case reads them before
    *("built_in_run", "built_in_run_drawn", "everything_made_in_first_run"),
    # steps that engines easily get wrong
    *("sharpness_aware", "lookahead_without_hooks", "update_by_hand", "spectral_norm"),
    *("weights_exchanged_as_a_vector", "weights_exchanged_as_a_vector_uneven", "gradients_given_between_steps"),
    *("parametrized_half_way", "pruned_further", "elements_of_other_shapes", "lookahead_without_hooks_idle"),
    *("edited_in_numpy_half_way", "inner_optimizer_over_a_copy"),
    *("count_in_optimizer_state", "weights_moved_by_optimizer", "assigned_gradients_uneven"),
    *("assigned_gradients_in_place_uneven", "parameter_made_in_forward"),
    # outside of runs, where no process has values
    *("stepped_outside_of_runs", "clipped_between_runs", "sums_clipped_between_runs", "penalized_between_runs"),
    *("sums_penalized_between_runs", "penalized_up_to_the_next_run", "sums_penalized_up_to_the_next_run"),
    *("penalties_alone", "penalties_alone_zeroed", "penalties_alone_idle", "penalties_alone_also_idle"),
    # what is loaded is cut, and not the tensor that was given: stands in "Known wrong"
    *("snapshot_loaded_again", "snapshot_loaded_again_idle"),
}
ALWAYS = (
    "several_backwards",
    "functional_call",
    "frozen_then_unfrozen",
    "adam_foreach",
    "gan",
    "exponential_scheduler_in_step",
)
REFUSED = ("lookahead", "lookahead_with_plain_hooks", "elements_exchanged_by_optimizer", "rate_set_by_optimizer")
"""As is every unknown optimizer over parameters that are cut: tests.dtensor.jobs has the error."""
NAMES = [name for name, case in contract.CASES.items() if not case.needs_compiler and name not in REFUSED]
PARTS = [
    [*dict.fromkeys((*ALWAYS, *NAMES[::64]))],
    *(NAMES[start::16] for start in range(1, 15)),
    [*NAMES[15::16], *NAMES[16::32], *NAMES[32::64]],
]
"""The first one always, the others in soak."""


_CUT: set[tuple[int, ...]] = set()
"""Shapes of what has been cut in this process."""


def planned(variables: CutVariables, tensor: torch.Tensor) -> Sharding:
    """Weights are cut along their inputs if these are even, as the first layer's are."""
    known = variables.find(tensor)
    if known is not None:
        return known.sharding
    if isinstance(tensor, nn.Parameter) and tensor.ndim > 1 and tensor.shape[1] % 2 == 0:
        _CUT.add(tuple(tensor.shape))
        return Sharding((2,), tuple(("d0",) if dim == 1 else () for dim in range(tensor.ndim)))
    return Sharding.replicated(tensor.ndim, 2)


def numbers(value: Any, plain: Any = testing._numbers) -> dict[str, Any]:
    """Of a model with variables that are cut, all of these."""
    if not isinstance(value, nn.Module):
        return plain(value)  # type: ignore[no-any-return]
    found = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    seen = {name: one.detach() for name, one in found.items()}
    if any(isinstance(one, CutTensor) for one in seen.values()):  # read in a run
        return {name: one.full_tensor() if isinstance(one, CutTensor) else one for name, one in seen.items()}
    return {name: one for name, one in value.state_dict(keep_vars=False).items() if name in found}


def run_cases(names: list[str]) -> list[contract.Snapshot]:
    row = contract.Row("2x2", 2, lambda **options: ts.MirroredStrategy(logical_devices_per_replica=2, **options))
    warnings.simplefilter("error")
    found = []
    for name in names:
        if name in RAISE_WHERE_CUT:
            found.append(contract.run_row(contract.CASES[name], row))
            continue
        with mock.patch.object(CutVariables, "planned", planned), mock.patch.object(testing, "_numbers", numbers):
            found.append(contract.run_row(contract.CASES[name], row))
    assert (5, 6) in _CUT  # the first layer of most models
    return found


@pytest.mark.parametrize("part", [0, *[pytest.param(part, marks=pytest.mark.soak) for part in range(1, len(PARTS))]])
def test_training_cases_give_the_numbers_of_one_device(part: int, four_processes: Workers) -> None:
    of_ranks = four_processes.run(run_cases, PARTS[part])
    for number, name in enumerate(PARTS[part]):
        case = contract.CASES[name]
        snapshots = [snapshots[number] for snapshots in of_ranks]
        contract.check_agreement(case, snapshots)
        expected = contract.reference(case, 2)
        for snapshot in snapshots:
            contract.check(case, snapshot, expected)
