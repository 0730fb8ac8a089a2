"""Stand-ins, the column "a tensor in a TPU step": every operation on tensors that differ between two replicas.

Right is: values and gradients of plain PyTorch on the host, for each replica; for operations that draw, shapes and
types, and other numbers on each replica. Its cells run with torch_xla, in `tests/tpu/test_stand_ins.py`. Compiling a
step costs more than running it, so operations share one; where that one does not come out right, each has its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F

import torchstrat as ts
from tests.matrix.stand_ins_on_tpu_verdicts import NO_ARGUMENTS, REFUSED, RIGHT_ELSEWHERE
from tests.matrix.table import RIGHT, Cell, PlantedFault, Table, assert_close, refused
from tests.matrix.tensor_operations import Operation, Sample, copied, operations, samples_of
from torchstrat import PerReplica
from torchstrat.core import nest
from torchstrat.errors import TorchstratError
from torchstrat.sharding.tpu import step_mode
from torchstrat.sharding.tpu.rewrites import Rewrites

_TENSOR: Any = torch.Tensor
COLUMN, PLACE = "a tensor in a TPU step", "tpu"
REPLICAS = 2
MOST_SAMPLES = 2
SEED = 5
IN_ONE_STEP = 24
SAMPLED_STEPS, SAMPLED_REFUSALS = 1, 12

_ABOUT_THE_OBJECT = frozenset(
    (
        *("__array_interface__", "__cuda_array_interface__", "__deepcopy__", "__dir__", "__dlpack__"),
        *("__dlpack_device__", "__hash__", "__iter__", "__reduce__", "__reduce_ex__", "__str__"),
        *("_backward_hooks", "_base", "_cdata", "_coerce_size_method", "_is_view", "_typed_storage"),
        *("_use_count", "_version", "apply_", "data_ptr", "device", "dim_order", "get_device", "grad_fn"),
        *("is_contiguous", "is_cpu", "is_pinned", "is_set_to", "is_shared", "is_xla", "map2_", "map_", "name"),
        *("names", "output_nr", "pin_memory", "register_hook", "register_post_accumulate_grad_hook"),
        *("retain_grad", "share_memory_", "storage", "storage_offset", "storage_type", "stride", "type"),
        *("untyped_storage"),
    )
)
"""They say something about a Python object or its memory, not about numbers."""

ITERATED = 1e-6
_BY_ITERATION = frozenset(("eigh", "eigvalsh", "linalg_eigh", "linalg_eigvalsh"))
"""This compiler ends their iterations at single precision."""

_UP_TO_SIGNS = frozenset(("eigh", "svd", "linalg_eigh", "qr", "_linalg_eigh", "symeig"))


class Call(NamedTuple):
    """One call of an operation, by both replicas. ``tensors``: of the first, in the order of the arguments."""

    operation: Operation
    sample: Sample
    tensors: tuple[torch.Tensor, ...]
    with_gradients: bool


class Result(NamedTuple):
    """Tensors that came out, and the gradients of the tensors that went in; anything else as it is."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None]


def of_replica(call: Call, replica: int) -> list[torch.Tensor]:
    """What goes in: other numbers on the second replica, from wherever the first one's are."""
    numbers = [one.detach().clone() for one in call.tensors]
    if replica == 0:
        return numbers
    return [one * 0.97 if one.is_floating_point() or one.is_complex() else one for one in numbers]


def compute(call: Call, tensors: Sequence[torch.Tensor]) -> Result:
    """The call, for one replica or in a step for both."""
    is_watched = [call.with_gradients and one.is_floating_point() for one in tensors]
    leaves = [
        one.detach().requires_grad_() if watched else one for one, watched in zip(tensors, is_watched, strict=True)
    ]
    given = iter([one.clone() for one in leaves] if call.operation.is_in_place else leaves)
    args, kwargs = _replaced((list(call.sample.args), dict(call.sample.kwargs)), given)
    outputs = _leaves(call.operation(*args, **kwargs))
    if not call.with_gradients:
        return Result([one.detach() if isinstance(one, torch.Tensor) else one for one in outputs], [])
    roots = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    loss: Any = 0.0
    for root in roots:
        real = root.real + 2.0 * root.imag if root.is_complex() else root
        factors = torch.arange(1, root.numel() + 1, dtype=torch.float64, device=root.device).reshape(root.shape)
        loss = loss + (real.to(torch.float64) * factors / max(root.numel(), 1)).sum()
    wanted = [one for one, watched in zip(leaves, is_watched, strict=True) if watched]
    gradients = list(torch.autograd.grad(loss, wanted, allow_unused=True)) if roots and wanted else []
    return Result([one.detach() if isinstance(one, torch.Tensor) else one for one in outputs], gradients)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]


def _replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(one, tensors) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, tensors) for one in value)
    if isinstance(value, dict):
        return {name: _replaced(one, tensors) for name, one in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def walk(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.append(one)
        for child in one if isinstance(one, list | tuple) else one.values() if isinstance(one, dict) else ():
            walk(child)

    walk(value)
    return found


# -- the references ----------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """A call, and what plain PyTorch makes of it on each replica. ``draws``: whether that differs from time to time."""

    call: Call
    wanted: list[Result]
    draws: bool


@functools.cache
def questions(key: str) -> tuple[Question, ...]:
    """What is asked of one operation."""
    _strategy()  # the devices first: autograd does not take up those that come after its first backward pass
    operation = next(one for one in operations() if one.key == key)
    found = []
    for sample in (*samples_of(operation, MOST_SAMPLES, _is_dense), *_ALSO_ASKED.get(key, ())):
        question = _question(operation, sample)
        if question is not None:
            found.append(question)
    return tuple(found)


# Of operators that the database has several entries for, of which the samples are from the first ones.
_ALSO_ASKED = {
    "torch.nn.functional.interpolate": tuple(
        Sample((torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(shape),), {"scale_factor": factor, "mode": mode})
        for mode, factor, shape in (
            *((mode, 1.7, (2, 3, 4, 4)) for mode in ("bilinear", "bicubic", "nearest", "nearest-exact", "area")),
            ("nearest", 0.6, (2, 1, 6, 8)),
            ("nearest", 1.7, (2, 6, 8)),
            ("nearest", 1.7, (2, 1, 3, 4, 4)),
            ("linear", 1.7, (2, 6, 8)),
            ("trilinear", 1.7, (2, 1, 3, 4, 4)),
            # As many pixels as before, and twice as many: there PyTorch does not go by the factor, or not always.
            *((mode, (1.1, 2.1), (2, 3, 4, 4)) for mode in ("bilinear", "bicubic", "nearest", "nearest-exact", "area")),
            *((mode, factor, (2, 6, 8)) for mode in ("linear", "nearest", "nearest-exact") for factor in (1.1, 2.1)),
            *((mode, (1.1, 1, 2.1), (2, 1, 3, 4, 4)) for mode in ("trilinear", "nearest", "nearest-exact")),
            ("nearest", (1.02, 2.03), (2, 1, 48, 1)),
        )
    ),
}


def _is_dense(sample: Sample) -> bool:
    given = _tensors((sample.args, dict(sample.kwargs)))
    return all(one.layout == torch.strided and type(one) is torch.Tensor for one in given) and not any(
        callable(one) for one in sample.args
    )


def _question(operation: Operation, sample: Sample) -> Question | None:
    given = tuple(_tensors(copied((list(sample.args), dict(sample.kwargs)))))
    for with_gradients in (True, False):
        call = Call(operation, sample, given, with_gradients)
        try:
            wanted, draws = _by_replica(call, 1), _draws(call)
        except Exception:
            continue
        if not with_gradients or any(one is not None for result in wanted for one in result.gradients):
            return Question(call, wanted, draws)
    return None


def _draws(call: Call) -> bool:
    """Whether the numbers depend on the seed. Those of binomial and its like may be equal for several, so who has moved
    the generator is asked for more of them."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        compute(call, of_replica(call, 0))
        seeds = range(2, 3) if torch.equal(before, torch.get_rng_state()) else range(2, 34)
    wanted = _by_replica(call, 1)
    return any(not _is_same(wanted, _by_replica(call, seed)) for seed in seeds)


def _by_replica(call: Call, seed: int) -> list[Result]:
    results = []
    for replica in range(REPLICAS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            results.append(compute(call, of_replica(call, replica)))
    return results


def _is_same(results: Sequence[Result], others: Sequence[Result]) -> bool:
    pairs = zip(_leaves([list(one) for one in results]), _leaves([list(one) for one in others]), strict=True)
    return all(_is_equal(one, other) for one, other in pairs if isinstance(one, torch.Tensor))


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_floating_point() or one.is_complex():
        one, other = one.to(torch.complex128).nan_to_num(), other.to(torch.complex128).nan_to_num()
    return torch.equal(one, other)


# -- the step ----------------------------------------------------------------------------------------------------------


@functools.cache
def _strategy() -> Any:
    ts.tpu.initialize_tpu_system()
    topology = ts.tpu.initialize_tpu_system()
    assignment = ts.tpu.DeviceAssignment.build(topology, num_replicas=REPLICAS)
    return ts.TPUStrategy(device_assignment=assignment, max_different_graphs=10**9)


def in_a_step(asked: Sequence[Question]) -> list[list[Result]]:
    """What the replicas get, by question."""
    parts = [
        [PerReplica(pair) for pair in zip(*(of_replica(one.call, replica) for replica in range(REPLICAS)), strict=True)]
        for one in asked
    ]

    def step(given: Any) -> Any:
        return [list(compute(one.call, own)) for one, own in zip(asked, given, strict=True)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)  # what is seen does not depend on what was asked before
        returned = _strategy().run(step, args=(parts,))
    by_replica = [
        nest.map_structure(
            lambda leaf, replica=replica: leaf.component(replica) if isinstance(leaf, PerReplica) else leaf, returned
        )
        for replica in range(REPLICAS)
    ]
    return [[Result(*own[index]) for own in by_replica] for index in range(len(asked))]


def judge(question: Question, seen: Sequence[Result]) -> None:
    """Raises AssertionError where what was seen is not what was wanted."""
    name = question.call.operation.name
    for replica, (own, wanted) in enumerate(zip(seen, question.wanted, strict=True)):
        where = f"replica {replica} of {name}{_shown(question.call)}"
        for what, ones, others in (("output", own.outputs, wanted.outputs), ("gradient", *own[1:], *wanted[1:])):
            if what == "gradient" and name in _UP_TO_SIGNS:
                continue
            assert len(ones) == len(others), f"{where}: {len(ones)} {what}s for {len(others)}"
            for place, (one, other) in enumerate(zip(ones, others, strict=True)):
                _compare(f"{where}: {what} {place}", one, other, question)
    if question.draws and "empty" not in name and "resize" not in name:
        first, second = ([one for one in own.outputs if isinstance(one, torch.Tensor)] for own in seen)
        many = sum(one.numel() for one in first)
        alike = all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(first, second, strict=True))
        assert not alike or many < 8, f"{name}: both replicas drew the same numbers"


def _compare(where: str, one: Any, other: Any, question: Question) -> None:
    assert isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor), f"{where}: {one!r:.60} for {other!r:.60}"
    if not isinstance(other, torch.Tensor):
        assert other is None or one == other or _is_nan(one, other), f"{where}: {one!r:.60} for {other!r:.60}"
        return
    assert one.shape == other.shape, f"{where}: {tuple(one.shape)} for {tuple(other.shape)}"
    if question.draws:
        return
    if question.call.operation.name in _UP_TO_SIGNS and other.is_floating_point():
        one, other = one.cpu().abs(), other.abs()
    if other.layout != torch.strided:
        one, other = one.cpu().to_dense(), other.to_dense()
    tolerance = ITERATED if question.call.operation.name in _BY_ITERATION else 1e-9
    assert_close({where: one}, {where: other}, tolerance)


def _is_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)


def _shown(call: Call) -> str:
    def show(leaf: Any) -> Any:
        return f"<{tuple(leaf.shape)}>" if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = nest.map_structure(show, (list(call.sample.args), dict(call.sample.kwargs)))
    return f"({args}, {kwargs})"[:200]


# -- the cells ---------------------------------------------------------------------------------------------------------


class _Outcomes:
    """What was asked already, in steps that several operations shared."""

    def __init__(self) -> None:
        self.known: dict[str, Exception | None] = {}
        self.are_shared = True

    def check(self, key: str) -> None:
        if not self.are_shared:
            _raise(_alone(key))
            return
        if key not in self.known:
            group = next(group for group in groups() if key in group)
            self.known |= _together(group) if len(group) > 1 else {key: _alone(key)}
        _raise(self.known[key])


OUTCOMES = _Outcomes()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _alone(key: str) -> Exception | None:
    """A call that is refused says nothing against another one that is right; numbers that are wrong do."""
    refusals: list[Exception] = []
    for question in questions(key):
        try:
            judge(question, in_a_step([question])[0])
        except TorchstratError as error:
            refusals.append(error.with_traceback(None))
        except Exception as error:
            return error.with_traceback(None)
    return refusals[0] if refusals and len(refusals) == len(questions(key)) else None


def _together(keys: Sequence[str]) -> dict[str, Exception | None]:
    asked = [question for key in keys for question in questions(key)]
    try:
        answers = in_a_step(asked)
    except Exception:
        return {key: _alone(key) for key in keys}
    found: dict[str, Exception | None] = dict.fromkeys(keys)
    for question, seen in zip(asked, answers, strict=True):
        try:
            judge(question, seen)
        except Exception as error:
            found[question.call.operation.key] = error.with_traceback(None)
    return found


@functools.cache
def rows() -> tuple[str, ...]:
    """Every operation that says something about numbers, and for which there are arguments."""
    left_out = NO_ARGUMENTS | RIGHT_ELSEWHERE.keys()
    return tuple(one.key for one in operations() if one.name not in _ABOUT_THE_OBJECT and one.key not in left_out)


@functools.cache
def groups() -> tuple[tuple[str, ...], ...]:
    """Operations that share a step. One that is refused has its own."""
    right = [key for key in rows() if key not in REFUSED]
    shared = [tuple(right[start : start + IN_ONE_STEP]) for start in range(0, len(right), IN_ONE_STEP)]
    return (*shared, *((key,) for key in rows() if key in REFUSED))


@functools.cache
def sample() -> frozenset[str]:
    """Keys of the rows that are always asked: some steps that others share, and some refusals."""
    shared = [group for group in groups() if len(group) > 1]
    alone = [group for group in groups() if len(group) == 1]
    chosen = (*shared[:: max(1, len(shared) // SAMPLED_STEPS)], *alone[:: max(1, len(alone) // SAMPLED_REFUSALS)])
    return frozenset(key for group in chosen for key in group)


def _cells() -> Iterator[Cell]:
    for key in rows():
        expected = RIGHT
        if key in REFUSED:
            expected = refused(TorchstratError, REFUSED[key], "the compiler, or the mapping over replicas, has no way")
        yield Cell(key, COLUMN, PLACE, partial(OUTCOMES.check, key), expected)


# -- planted faults ----------------------------------------------------------------------------------------------------


@contextmanager
def _without(*functions: Any) -> Iterator[None]:
    """In this block these functions have no replacement."""
    find = Rewrites.find
    off = {id(function) for function in functions}

    def found(self: Rewrites, func: Any) -> Any:
        return None if id(func) in off else find(self, func)

    with mock.patch.object(Rewrites, "find", found), _asked_alone():
        yield


@contextmanager
def _asked_alone() -> Iterator[None]:
    OUTCOMES.are_shared = False
    try:
        yield
    finally:
        OUTCOMES.are_shared = True


@contextmanager
def _without_handler(function: Any) -> Iterator[None]:
    """In this block a step calls ``function`` as any other."""
    make = step_mode.StepMode.__init__

    def made(self: Any, *args: Any) -> None:
        make(self, *args)
        self._handlers.pop(function)

    with mock.patch.object(step_mode.StepMode, "__init__", made), _asked_alone():
        yield


def _fault(name: str, plant: Callable[[], Any], *keys: str) -> PlantedFault:
    return PlantedFault(name, plant, [f"{key} | {COLUMN} | {PLACE}" for key in keys])


def _rewrite_off(key: str, *functions: Any) -> PlantedFault:
    return _fault(f"{key} has no replacement", partial(_without, *functions), key)


_FFT: Any = torch.fft
FAULTS = (
    _rewrite_off("torch.nn.functional.interpolate", F.interpolate),
    _rewrite_off("torch.fft.rfft", _FFT.rfft),
    _rewrite_off("torch.fft.hfft2", _FFT.hfft2),
    _rewrite_off("torch.select_scatter", torch.select_scatter),
    _rewrite_off("torch.nn.functional.avg_pool2d", F.avg_pool2d),
    _rewrite_off("torch.log2", torch.log2),
    _rewrite_off("torch.nn.functional.gelu", F.gelu),
    _rewrite_off("torch.nn.functional.elu", F.elu),
    _rewrite_off("torch.nn.functional.rrelu", F.rrelu),
    _fault(
        "detach_ is no call of the step's mode",
        partial(_without_handler, torch.Tensor.detach_),
        "torch.Tensor.detach_",
    ),
    _fault(
        "the getter of .data is no call of the step's mode",
        partial(_without_handler, _TENSOR.data.__get__),
        "torch.Tensor.data",
    ),
)

TABLE = Table(
    name="stand_ins_on_tpu",
    question="What does an operation on tensors that differ between the replicas of a TPU step come to?",
    make_cells=_cells,
    faults=FAULTS,
    environment="tpu",
)
