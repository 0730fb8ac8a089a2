"""A worker's own copies of the captured objects, under the coordinator's tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core.errors import FunctionError
from torchstrat.core.optimizers import is_listed, take_over_steps
from torchstrat.parameter_server.messages import Token, VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import Increment, token_of_spec
from torchstrat.parameter_server.serialization.path_errors import NotHere

_CPU = torch.device("cpu")


class World:
    """What functions refer to, on one worker. Used by one thread at a time.

    Args:
        make_tensor: makes the worker's tensor for a variable, the first time it is met: an `torch.nn.Parameter` for
            kind ``parameter``, else a tensor. Its values are nobody's business here.
        make_missing: makes the object of a token that is referred to and was never registered (a per-worker dataset,
            for example); None: such a reference is an error.
        device: where plain tensors arrive that were on an accelerator.
        make_view: makes a view of what ``make_tensor`` has made: shape, strides, first element.

    Attributes:
        version: number of the last increment that was loaded; 0 in the beginning.
        make_tensor: as given, for recipes.
    """

    def __init__(
        self,
        make_tensor: Callable[[VariableSpec], torch.Tensor],
        make_missing: Callable[[Token], object] | None = None,
        device: torch.device = _CPU,
        make_view: Callable[..., torch.Tensor] = torch.as_strided,
    ) -> None:
        self.make_tensor = make_tensor
        self._make_view = make_view
        self.device = device
        self.version = 0
        self._make_missing = make_missing
        self._objects: dict[Token, Any] = {}
        self._tokens: dict[int, Token] = {}  # by id of objects that `_objects` keeps alive
        self._specs: dict[Token, VariableSpec] = {}

    # -- taking in --------------------------------------------------------------------------------------------------

    def register(self, token: Token, value: object) -> None:
        """This worker's object for a token; it replaces an earlier one."""
        self._drop(token)
        self._objects[token] = value
        self._tokens[id(value)] = token

    def load(self, increment: Increment) -> None:
        """Take in what was captured. An increment that was loaded before changes nothing.

        Raises:
            FunctionError: an earlier increment is missing. What needs a module that this process cannot import, or
                whose own code raises when it is made, raises that when it is used.
        """
        if increment.number <= self.version:
            return
        if increment.since > self.version:
            raise FunctionError(
                f"captured objects arrived out of order: increment {increment.number} builds on {increment.since}, "
                f"and this worker has {self.version}."
            )
        from torchstrat.parameter_server.serialization.pickler import load_increment

        blob, tensors, buffers = increment.blob, increment.tensors, increment.buffers
        objects, _ = load_increment(blob, tensors, buffers, self._look_up_any, self.device)
        for token, value in objects:
            self.register(token, value)
            if isinstance(value, Optimizer) and not is_listed(type(value)):
                take_over_steps(type(value), without_compiler=True)
        self.version = increment.number

    def unpickle(self, blob: bytes, tensors: tuple[torch.Tensor, ...], buffers: int, what: str) -> Any:
        """Undo a pickle of the coordinator's; ``what`` it is, for the error of a module that is missing here."""
        # cloudpickle is loaded when it is needed
        from torchstrat.parameter_server.serialization.pickler import ObjectUnpickler

        try:
            return ObjectUnpickler(blob, tensors, buffers, self._look_up, self.device).load()
        except ModuleNotFoundError as error:
            raise _missing(error, what) from error

    def unpickle_plain(self, blob: bytes, what: str) -> Any:
        """The same for a pickle that refers to nothing captured, and has no tensors beside it."""
        try:
            return pickle.loads(blob)
        except ModuleNotFoundError as error:
            raise _missing(error, what) from error

    def _look_up_any(self, reference: tuple[Any, ...]) -> object:
        """Also a stand-in for what could not be imported: what holds it may be used without it."""
        known = self._objects.get(reference[1]) if reference[0] == "ref" else None
        return known if isinstance(known, NotHere) else self._look_up(reference)

    def _look_up(self, reference: tuple[Any, ...]) -> object:
        if reference[0] == "tensor":
            return self.tensor_of(reference[1])
        if reference[0] == "made":
            _, token, recipe = reference
            if token not in self._objects:
                self.register(token, recipe(self))
            return self._objects[token]
        if reference[0] == "view":
            _, whole, *place = reference
            return self._make_view(self._look_up(whole), *place)
        return self.resolve(reference[1])

    def tensor_of(self, spec: VariableSpec) -> torch.Tensor:
        """What stands for a variable here, made when it is first asked for."""
        token = token_of_spec(spec)
        known = self._specs.get(token)
        if token not in self._objects:
            self.register(token, self.make_tensor(spec))
            self._specs[token] = spec
        elif known is not None and spec.shape > known.shape:  # it has more rows now, and is the same object still
            self.make_tensor(spec)
            self._specs[token] = spec
        tensor: torch.Tensor = self._objects[token]
        return tensor

    def release(self, tokens: Iterable[Token]) -> None:
        """The coordinator has dropped its objects."""
        for token in tokens:
            self._drop(token)

    def _drop(self, token: Token) -> None:
        if token in self._objects:
            self._tokens.pop(id(self._objects.pop(token)), None)
            self._specs.pop(token, None)

    # -- what there is ----------------------------------------------------------------------------------------------

    def resolve(self, token: Token) -> Any:
        """This worker's object for a token."""
        if token not in self._objects:
            if self._make_missing is None:
                known = ", ".join(map(str, self._objects)) or "none"
                raise FunctionError(
                    f"a function refers to {token!r}, which this worker does not have. It has: {known}."
                )
            self.register(token, self._make_missing(token))
        found = self._objects[token]
        if isinstance(found, NotHere):
            found()  # raises, and says what is missing
        return found

    def find(self, token: Token) -> object:
        """This worker's object for a token, as far as it has one; None for one without weak references, too."""
        found = self._objects.get(token)
        return found if getattr(type(found), "__weakrefoffset__", 0) else None

    def knows(self, token: Token) -> bool:
        """Whether there is an object for a token; the coordinator may have dropped its own before this world began, and
        this process may lack its class."""
        return token in self._objects and not isinstance(self._objects[token], NotHere)

    def token_of(self, value: object) -> Token | None:
        """The token of a captured object; None for any other."""
        return self._tokens.get(id(value))

    def modules(self) -> Iterator[tuple[Token, nn.Module]]:
        """Every captured module, children too, in the order of their tokens' first arrival."""
        return ((token, value) for token, value in list(self._objects.items()) if isinstance(value, nn.Module))

    def optimizers(self) -> Iterator[tuple[Token, Optimizer]]:
        return ((token, value) for token, value in list(self._objects.items()) if isinstance(value, Optimizer))


def _missing(error: ModuleNotFoundError, what: str) -> FunctionError:
    return FunctionError(
        f"{what} need the module {error.name!r}, which this worker cannot import. Install it on the workers, or have "
        f"it sent: cloudpickle.register_pickle_by_value({error.name}) on the coordinator."
    )
