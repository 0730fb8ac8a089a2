"""Deliberate differences that several areas share; each promise runs the case and asserts what torchstrat does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.conformance.comparison import require_explanation
from tests.conformance.harness import Case, Difference, check, outcome
from torchstrat.core.devices import canonical
from torchstrat.errors import TorchstratError

Operation = Callable[[Case], Any]


def _with_dtype(recorded: Any, dtype: str) -> Any:
    """The recorded result with every tensor of that dtype."""
    if isinstance(recorded, dict):
        if "dtype" in recorded:
            return recorded | {"dtype": dtype}
        return {key: _with_dtype(value, dtype) for key, value in recorded.items()}
    return [_with_dtype(item, dtype) for item in recorded] if isinstance(recorded, list) else recorded


def integer_mean(operation: Operation, number: int = 5) -> Difference:
    """TensorFlow's integer mean is float64 for several replicas, and an integer for one."""

    def promise(case: Case) -> None:
        """The same numbers in the default floating dtype."""
        name = str(torch.get_default_dtype()).removeprefix("torch.")
        check(replace(case, expect=_with_dtype(case.expect, name)), operation(case))

    return Difference(number, promise)


def raises(number: int, kind: type[Exception], message: str, operation: Operation) -> Difference:
    """An error where TensorFlow gives a result or fails in another way."""

    def promise(case: Case) -> None:
        error = outcome(lambda: operation(case))
        assert isinstance(error, kind), repr(error)
        assert isinstance(error, TorchstratError), repr(error)
        assert re.search(message, str(error)), error
        require_explanation(error, case.id)

    promise.__doc__ = f"Raises {kind.__name__}: {message}."
    return Difference(number, promise)


def returns(number: int, doc: str, expect: Any, operation: Operation) -> Difference:
    """Another result than TensorFlow's: ``expect``, written as in the case file."""

    def promise(case: Case) -> None:
        check(replace(case, expect=expect), operation(case))

    promise.__doc__ = doc
    return Difference(number, promise)


def recorded_devices(operation: Operation, number: int = 20) -> Difference:
    """TensorFlow's device names."""

    def canonical_names(recorded: Any) -> Any:
        if isinstance(recorded, dict):
            return {key: canonical_names(value) for key, value in recorded.items()}
        if isinstance(recorded, list):
            return [canonical_names(item) for item in recorded]
        return canonical(recorded) if isinstance(recorded, str) and "CPU" in recorded else recorded

    def promise(case: Case) -> None:
        """The same devices, in PyTorch's spelling."""
        check(replace(case, expect=canonical_names(case.expect)), operation(case))

    return Difference(number, promise)
