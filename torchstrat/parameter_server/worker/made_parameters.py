"""Parameters that a scheduled function gives modules of the coordinator: refused, since nobody else has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchstrat.errors import UnsupportedError


class _Here(threading.local):
    noted: list[tuple[nn.Module, str]] | None = None


_here = _Here()


def notice_parameters() -> Any:
    """Have PyTorch tell of parameters that modules are given, until the handle is removed."""
    return register_module_parameter_registration_hook(_note)


def _note(module: nn.Module, name: str, parameter: Any) -> None:
    if _here.noted is not None and parameter is not None:
        _here.noted.append((module, name))


class MadeParameters:
    """``with``: around one function, on its thread. ``is_captured``: whether a module is one of the coordinator's;
    ``is_variable``: whether a tensor is one of the job's."""

    def __init__(self, is_captured: Callable[[Any], bool], is_variable: Callable[[torch.Tensor], bool]) -> None:
        self._is_captured, self._is_variable = is_captured, is_variable

    def __enter__(self) -> None:
        _here.noted = []

    def __exit__(self, *_: Any) -> None:
        _here.noted = None

    def check(self) -> None:
        """Raise `UnsupportedError` for those that are still there."""
        for module, name in _here.noted or ():
            parameter = module._parameters.get(name)
            if parameter is not None and self._is_captured(module) and not self._is_variable(parameter):
                raise UnsupportedError(
                    f"a scheduled function has made a parameter, {name!r} of a {type(module).__name__}. It is this "
                    "worker's alone: no server has it, and no other worker. Make it on the coordinator, within "
                    "`with strategy.scope():`, for example by calling the module there once."
                )
