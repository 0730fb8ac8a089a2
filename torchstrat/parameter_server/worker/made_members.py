"""What a scheduled function gives modules of the coordinator: parameters are refused, since nobody else has them, and
buffers are warned of.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from torchstrat.core._torch_private import own_buffers, own_parameters
from torchstrat.core.errors import UnsupportedError
from torchstrat.parameter_server.worker.local_variables import Copies


class _MadeHere(threading.local):
    noted: list[tuple[nn.Module, str]] | None = None


_made_here = _MadeHere()


def notice_members() -> tuple[Any, ...]:
    """Have PyTorch tell of parameters and buffers that modules are given, until the handles are removed."""
    return register_module_parameter_registration_hook(_note), register_module_buffer_registration_hook(_note)


def _note(module: nn.Module, name: str, tensor: object) -> None:
    if _made_here.noted is not None and tensor is not None:
        _made_here.noted.append((module, name))


class MadeMembers:
    """``with``: around one function, on its thread. ``is_captured``: whether a module is one of the coordinator's."""

    def __init__(self, is_captured: Callable[[object], bool], copies: Copies) -> None:
        self._is_captured, self._copies = is_captured, copies
        self._warned: set[tuple[type, str]] = set()

    def __enter__(self) -> None:
        _made_here.noted = []

    def __exit__(self, *_: object) -> None:
        _made_here.noted = None

    def check(self) -> None:
        """Raise `UnsupportedError` for parameters that are still there, and warn of buffers."""
        for module, name in _made_here.noted or ():
            if own_buffers(module).get(name) is not None and self._is_captured(module):
                self._warn_of_buffer(module, name)
            parameter = own_parameters(module).get(name)
            if parameter is not None and self._is_captured(module) and self._copies.spec_of(parameter) is None:
                raise UnsupportedError(
                    f"a scheduled function has made a parameter, {name!r} of a {type(module).__name__}. It is this "
                    "worker's alone: no server has it, and no other worker. Make it on the coordinator, within "
                    "`with strategy.scope():`, for example by calling the module there once."
                )

    def _warn_of_buffer(self, module: nn.Module, name: str) -> None:
        kind = type(module)
        if not self._copies.has_buffer(module, name) and (kind, name) not in self._warned:
            self._warned.add((kind, name))
            warnings.warn(
                f"a scheduled function has given a {kind.__name__} a buffer, {name!r}, which it has not on the "
                "coordinator. It is this worker's alone: no server has it, nor state_dict() there, nor another worker. "
                "That is right for what each works out anew (a mask); make what is to be kept within `with "
                "strategy.scope():`.",
                stacklevel=2,
            )
