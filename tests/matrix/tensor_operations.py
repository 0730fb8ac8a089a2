"""What can be done with a tensor, found by looking into torch: the rows of the tables of stand-ins.

`operations` lists every attribute and method of `torch.Tensor`, and every function of `torch`, `torch.nn.functional`,
`torch.nn.init`, `torch.linalg`, `torch.fft` and `torch.special` that takes a tensor, so that a new version of torch
adds rows by itself. `samples_of` has arguments for one, from torch's own database of operators (OpInfo) where that has
any, in float64 where the operator knows it; else what plain torch accepts of some usual ones. What gets no arguments
at all is a row too: then nothing but the refusal can be asked for.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
import unittest
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.nn import functional, init
from torch.overrides import get_overridable_functions


class _OfAnother:
    """Methods of a plain tensor, and what else takes a tensor that is not the first argument: with that one first."""

    @staticmethod
    def new_tensor(data: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1).new_tensor(data)

    @staticmethod
    def new(data: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, dtype=data.dtype).new(data)  # type: ignore[no-any-return]

    @staticmethod
    def set_(data: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, dtype=data.dtype).set_(data)

    @staticmethod
    def copy_(data: torch.Tensor) -> torch.Tensor:
        return torch.empty(data.shape, dtype=data.dtype).copy_(data)

    @staticmethod
    def sparse_values(data: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.arange(len(data))[None], data).to_dense()

    @staticmethod
    def sparse_values_without_sizes(data: torch.Tensor) -> torch.Tensor:
        return torch.sparse.DoubleTensor(torch.arange(len(data))[None], data).to_dense()  # type: ignore[no-any-return]

    @staticmethod
    def tensor_of_list(data: torch.Tensor) -> torch.Tensor:
        return torch.tensor([data, data])

    @staticmethod
    def tensor_of_rows(data: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(data))

    @staticmethod
    def float32_tensor(data: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(data, dtype=torch.float32)

    @staticmethod
    def copied_array(data: torch.Tensor) -> torch.Tensor:
        return torch.asarray(data, copy=True)

    @staticmethod
    def numpy_array(data: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.array(data.detach()))


PLACES: Mapping[str, Any] = {
    "torch.Tensor": torch.Tensor,
    "torch": torch,
    "torch.nn.functional": functional,
    "torch.nn.init": init,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "of_another": _OfAnother,
}
_PREFIXES = {
    "torch.nn.functional": "nn.functional.",
    "torch.linalg": "linalg.",
    "torch.fft": "fft.",
    "torch.special": "special.",
}
"""Before the names of the database's entries."""

_MACHINERY = frozenset(
    f"__{name}__"
    for name in (
        *("class", "new", "init", "init_subclass", "subclasshook", "dict", "weakref", "module", "doc", "slotnames"),
        *("torch_function", "torch_dispatch", "getattribute", "getattr", "setattr", "delattr", "dir", "sizeof"),
        *("getstate", "setstate", "annotations", "static_attributes", "firstlineno"),
    )
)
"""Members of the class that make tensors what they are, and do nothing with one."""

_MAKERS = (
    *("tensor", "as_tensor", "asarray", "is_tensor", "scalar_tensor", "DoubleTensor", "from_dlpack"),
    *("sparse_coo_tensor", "sparse_csr_tensor"),
)
"""Functions that take a tensor, although torch does not let classes of tensors override all of them."""


@dataclass(frozen=True)
class Operation:
    """One attribute, method or function. Calling it does what a program's line does: an attribute of the first argument
    is read, a method is looked up on it."""

    place: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.place}.{self.name}"

    @property
    def is_method(self) -> bool:
        return self.place == "torch.Tensor"

    @property
    def is_attribute(self) -> bool:
        return self.is_method and not callable(getattr(torch.Tensor, self.name))

    @property
    def is_in_place(self) -> bool:
        """Whether it changes its first argument."""
        if self.name in ("__setitem__", "__delitem__"):
            return True
        is_operator = self.name.startswith("__i") and self.name[3:-2] in _OPERATORS and self.name.endswith("__")
        return is_operator or (self.name.endswith("_") and not self.name.endswith("__"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_attribute:
            return getattr(args[0], self.name)
        if self.is_method:
            return getattr(args[0], self.name)(*args[1:], **kwargs)
        return getattr(PLACES[self.place], self.name)(*args, **kwargs)


_OPERATORS = frozenset(
    ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "div")
)


_METHODS_OF_OPERATORS = {
    "truediv": "div",
    "invert": "bitwise_not",
    "mod": "remainder",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "floordiv": "floor_divide",
}


class Sample(NamedTuple):
    """Arguments of one call. The first is a tensor, or a list of tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@functools.cache
def operations() -> tuple[Operation, ...]:
    """Every operation, in an order that is the same in every process."""
    return tuple(Operation(place, name) for place in PLACES for name in _names_in(place))


def _names_in(place: str) -> list[str]:
    if place == "torch.Tensor":
        own = {name for kind in torch.Tensor.__mro__ if kind is not object for name in vars(kind)} - _MACHINERY
        return sorted(name for name in own if not _is_private(name) or name in _overridable_names()["torch.Tensor"])
    if PLACES[place] is _OfAnother:
        return sorted(name for name in vars(_OfAnother) if not name.startswith("__"))
    members = {name: getattr(PLACES[place], name) for name in dir(PLACES[place])}
    found = {name for name, one in members.items() if name in _overridable_names()[place] and callable(one)}
    if place == "torch":
        found |= {name for name in members if name.startswith("_foreach_")} | {*_MAKERS} & members.keys()
    if place == "torch.nn.init":
        found |= {name for name in members if name.endswith("_") and not name.startswith("_")}
    return sorted(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@functools.cache
def _overridable_names() -> Mapping[str, frozenset[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functions = {one for listed in get_overridable_functions().values() for one in listed if callable(one)}
        names = {}
        for place, owner in PLACES.items():
            if owner is _OfAnother:
                continue
            members = {name: inspect.getattr_static(owner, name) for name in dir(owner)}
            found = {name for name, one in members.items() if _is_among(getattr(owner, name, one), functions)}
            if owner is torch.Tensor:  # attributes are listed by their getters
                found |= {name for name, one in members.items() if _is_among(getattr(one, "__get__", None), functions)}
            names[place] = frozenset(found)
    return names


def _is_among(one: Any, functions: set[Any]) -> bool:
    try:
        return one in functions
    except TypeError:
        return False


# -- arguments ---------------------------------------------------------------------------------------------------------


def samples_of(
    operation: Operation, most: int, fits: Callable[[Sample], bool] = lambda sample: True
) -> tuple[Sample, ...]:
    """At most so many calls that plain torch accepts and ``fits`` does, the same in every process; new tensors."""
    # Closed here, or the sizes that it has set would stay until its frame is collected: at no two processes at once.
    with _drawing(operation) as seed, closing(_of_database(operation)) as database:
        made = (one for one in database if _has_tensor_first(operation, one) and fits(one))
        found = list(islice(made, 4 * most))
        if not found:
            usual = (one for one in _usual() if _has_tensor_first(operation, one) and fits(one))
            found = [one for one in usual if _is_accepted(operation, one)]
    return tuple(random.Random(seed).sample(found, min(most, len(found))))


@contextmanager
def _drawing(operation: Operation) -> Iterator[int]:
    """In the block samples are drawn from a seed of the operation's own, which it is given.

    Most of the time would go to frames: the database looks through all of them for the test that asks, and to seed a
    device that is not there yet is noted down with them.
    """
    _database()
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    seed = zlib.crc32(operation.key.encode())
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        mock.patch.object(common_utils, "extract_test_fn", return_value=None),
        mock.patch.object(core, "extract_test_fn", return_value=None),
        mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield seed


def _has_tensor_first(operation: Operation, sample: Sample) -> bool:
    if operation.name.startswith("__") and sample.kwargs:
        return False  # operators take none
    first = sample.args[0] if sample.args else None
    if isinstance(first, list | tuple) and not operation.is_method:
        return bool(first) and all(isinstance(one, torch.Tensor) for one in first)
    return isinstance(first, torch.Tensor)


def _of_database(operation: Operation) -> Iterator[Sample]:
    for entry in _entries().get(operation.key, ()):
        dtype = next((one for one in _DTYPES if one in entry.dtypes), None)
        if dtype is None:
            continue
        for sizes in (_SMALL, {}):  # even sizes, and where an entry cannot do with these its own
            with _with_sizes(sizes):
                made = _until_error(entry, dtype)
                first = next(made, None)
                if first is not None:
                    yield from (Sample((one.input, *one.args), dict(one.kwargs)) for one in chain([first], made))
                    break


def _until_error(entry: Any, dtype: torch.dtype) -> Iterator[Any]:
    try:
        yield from islice(entry.sample_inputs("cpu", dtype, requires_grad=False), 60)
    except Exception:  # of an entry whose sizes are bound to one another
        return


_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)
_SMALL = {"S": 4, "XS": 2, "M": 6, "L": 8}


@contextmanager
def _with_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """The database's entries take the sizes of their tensors from names of their modules."""
    with ExitStack() as patches:
        for module in _modules_of_the_database():
            known = {key: size for key, size in sizes.items() if key in vars(module)}
            patches.enter_context(mock.patch.multiple(module, **known) if known else nullcontext())
        yield


@functools.cache
def _modules_of_the_database() -> tuple[types.ModuleType, ...]:
    names = ("torch.testing._internal.opinfo", "torch.testing._internal.common_methods_invocations")
    return tuple(module for name, module in sys.modules.items() if name.startswith(names))


@functools.cache
def _entries() -> Mapping[str, list[Any]]:
    """Key of an operation → the database's entries that have its arguments."""
    entries: dict[str, list[Any]] = {}
    by_name: dict[str, list[Any]] = {}
    for entry in _database():
        for one in (entry, *entry.aliases):
            by_name.setdefault(one.name, []).append(entry)
            for variant, ending in (("method_variant", ""), ("inplace_variant", "_")):
                if getattr(one, variant, None) is not None:
                    entries.setdefault(f"torch.Tensor.{one.name}{ending}", []).append(entry)
    for operation in operations():
        if operation.key not in entries:
            bare = operation.name.removesuffix("_") if operation.is_in_place else operation.name
            if bare.startswith("__") and bare not in by_name:
                bare = bare.strip("_")
                bare = bare[1:] if bare[:1] in "ir" and bare[1:] in _OPERATORS else bare
                bare = _METHODS_OF_OPERATORS.get(bare, bare)
                bare = f"bitwise_{bare}" if bare in ("and", "or", "xor") else bare
            prefixes = [_PREFIXES.get(operation.place, "")]
            if operation.is_method or operation.place == "torch":
                prefixes += ["nn.functional.", "linalg.", "special."]
            found = next((by_name[prefix + bare] for prefix in prefixes if prefix + bare in by_name), None)
            if found:
                entries[operation.key] = found
    return entries


@functools.cache
def _database() -> tuple[Any, ...]:
    if "expecttest" not in sys.modules:
        try:
            import_module("expecttest")  # of torch's tests, which load it and for this need nothing of it
        except ImportError:
            substitute: Any = types.ModuleType("expecttest")
            substitute.TestCase = unittest.TestCase
            sys.modules["expecttest"] = substitute
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return tuple(op_db)


def _usual() -> Iterator[Sample]:
    """Calls with a tensor that many functions accept."""

    def one() -> torch.Tensor:
        return torch.rand(4, 4, dtype=torch.float64) + 0.5

    yield Sample((one(),), {})
    yield Sample((one(), one()), {})
    yield Sample((one(), 1), {})
    yield Sample((one(), 0.5), {})
    yield Sample((one(), one(), one()), {})
    yield Sample((one(), torch.tensor([0, 1, 1, 3])), {})
    yield Sample((one(), 0, torch.tensor([0, 1])), {})
    yield Sample((one(), 0, 1), {})
    yield Sample((one(), (4, 4)), {})
    yield Sample((one(), "ij->ji"), {})
    yield Sample((one()[None], 2), {})
    yield Sample((one()[None, None], 2), {})
    yield Sample((one()[None, None], one()[None, None]), {})
    yield Sample((one()[None], 2.0, 2), {})
    yield Sample((one()[None, None], 2.0, 2), {})
    yield Sample((one()[None], (2, 4), 2), {})
    yield Sample((one()[None, None, None], 2, 2.0), {})
    yield Sample((one(), {}), {})
    yield Sample((one(), ""), {})
    yield Sample(([one(), one()],), {})
    yield Sample(([one(), one()], [one(), one()]), {})
    yield Sample(([one(), one()], 0.5), {})
    yield Sample(([one(), one()], [one(), one()], [one(), one()]), {})
    yield Sample((one(), lambda *values: values[0]), {})
    yield Sample((one() > 1,), {})
    yield Sample((one() > 1, one() > 1), {})
    yield Sample((torch.arange(8).view(4, 2),), {})
    yield Sample((torch.arange(8).view(4, 2), torch.arange(8).view(4, 2)), {})
    yield Sample((torch.arange(8).view(4, 2), 1), {})
    yield Sample((torch.rand(4, 4, dtype=torch.complex128),), {})
    yield Sample((torch.tensor(2.0, dtype=torch.float64),), {})
    yield Sample((torch.tensor(2),), {})


def _is_accepted(operation: Operation, sample: Sample) -> bool:
    try:
        return operation(*copied(sample.args), **copied(dict(sample.kwargs))) is not NotImplemented
    except Exception:
        return False


def copied(value: Any) -> Any:
    """``value`` with other tensors of the same values, wherever they are in there."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    return value


def refused_samples_of(
    operation: Operation, most: int, fits: Callable[[Sample], bool] = lambda sample: True
) -> tuple[Sample, ...]:
    """At most so many calls that plain torch raises for: those of `samples_of`, where an argument that is a tensor is
    the first half of itself, and some that the database knows."""
    with _drawing(operation):
        made = [half for one in samples_of(operation, most, fits) for half in _with_halves(one)]
        for entry in _entries().get(operation.key, ()):
            try:
                errors = [one.sample_input for one in islice(entry.error_inputs("cpu"), 40)]
            except Exception:  # most entries have none
                continue
            made += [Sample((one.input, *one.args), dict(one.kwargs)) for one in errors]
        right = (one for one in made if _has_tensor_first(operation, one) and fits(one))
        return tuple(islice((one for one in right if not _is_accepted(operation, one)), most))


def _with_halves(sample: Sample) -> Iterator[Sample]:
    for index, value in enumerate(sample.args):
        if index and isinstance(value, torch.Tensor):
            for dim in {0, value.ndim - 1} if value.ndim else ():
                half = value.narrow(dim, 0, value.shape[dim] // 2)
                yield Sample((*sample.args[:index], half, *sample.args[index + 1 :]), sample.kwargs)
    for name, value in sample.kwargs.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            yield Sample(sample.args, {**sample.kwargs, name: value.narrow(0, 0, value.shape[0] // 2)})
