"""How functions, their arguments and their results travel between the coordinator and its workers.

On a worker they refer to its own copies of the captured objects, under the coordinator's tokens (`World`).

A function travels with its closure, its globals, its defaults. What of these is captured (`Catalog`) goes as a
reference, and the worker's function finds the worker's own objects in its place; everything else goes as a copy.
**Python state is therefore a copy per worker**: a counter that a function keeps in its closure or in a global counts
that worker's calls, and the coordinator's stays as it is. Return what the coordinator should see, or keep it in a
`torchstrat.Variable`. The same function sent again unchanged (equal `Packed.digest`) is meant to be sent once per
worker, so such state lives on between calls; a function whose closure has changed is another function.

Tensors among the arguments and in closures are copied when packed, so changing them afterwards does no harm. The same
tensor twice is the same tensor there, while views of one storage no longer share it. In closures and in attributes of
modules, views of a variable are views of the worker's own.

An exception that a function raised comes back as itself: its class, its arguments, its attributes.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core.errors import FunctionError, NotSendableError
from torchstrat.core.optimizers import is_listed, take_over_steps
from torchstrat.core.tracebacks import shorten
from torchstrat.core.variable.tensor_like import TensorLike
from torchstrat.parameter_server.dispatch import Raised
from torchstrat.parameter_server.messages import Token, VariableSpec
from torchstrat.parameter_server.serialization import plain
from torchstrat.parameter_server.serialization.captured_objects import (
    Catalog,
    Increment,
    Outgoing,
    culprit_of,
    token_of_spec,
)
from torchstrat.parameter_server.serialization.pack_cache import Packed, Remembered
from torchstrat.parameter_server.serialization.path_errors import (
    NotHere,
    Refused,
    name_of,
    not_sendable,
    path_to,
    paths,
    refusal,
)
from torchstrat.parameter_server.serialization.plain import (
    ATOMS,
    from_parts,
    in_parts,
    is_dense,
    is_plain,
    snapshot,
)

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


# -- functions -------------------------------------------------------------------------------------------------------

LARGE_BYTES = 64 * 2**20
"""More data than this in a closure is worth a warning: it travels to every worker."""


def pack(value: object, catalog: Catalog, what: str = "fn", remembered: Remembered | None = None) -> Packed:
    """Make a function (``what="fn"``) or its arguments (``what="args"``, say) ready for a worker. On the coordinator.

    ``what`` begins the paths in error messages; a function is called by its own name there. Call
    `Catalog.increments` afterwards, for what the references stand for. ``remembered`` keeps it, if it can.

    Raises:
        NotSendableError: a part cannot travel; the message names it and how it is reached.
    """
    # cloudpickle is loaded when it is needed
    from torchstrat.parameter_server.serialization.pickler import ObjectPickler

    catalog.begin()
    references = Outgoing(catalog, value, follows=what == "fn")
    pickler = ObjectPickler(references)
    name = name_of(value, what)
    try:
        blob = pickler.pickle(value)
    except Exception as error:
        culprit, reason = culprit_of(error, pickler.last)
        where = path_to(value, name, lambda found: found is culprit, references.enters)
        raise not_sendable(where or f"{name} → something in it", culprit, reason, "a worker") from error
    packed = Packed(
        blob, pickler.tensors, pickler.buffers, frozenset(references.tokens), name, tuple(references.tokens.values())
    )
    if what == "fn" and packed.nbytes > LARGE_BYTES:
        _warn_of_size(value, name, packed, catalog, references)
    if remembered is not None:
        remembered.keep(value, packed, references)
    return packed


def simple_arguments(args: Sequence[object], kwargs: Mapping[str, object] | None, catalog: Catalog) -> Packed | None:
    """What `pack` makes of a function's arguments where they are plain values, tensors and captured objects; None for
    others.
    For a catalog that has seen what the registry knows (`Catalog.is_up_to_date`)."""
    if not args and not kwargs:
        return _NO_ARGUMENTS
    value = tuple(args), dict(kwargs or {})
    if is_plain(value):
        blob = plain.dumps(value)
        if not plain.may_hold_addresses(blob):
            return Packed(blob, what="args")
    buffer = io.BytesIO()
    pickler = _ReferencesPickler(buffer, catalog)
    try:
        pickler.dump(value)
    except _NeedsMoreError:
        return None
    tokens = pickler.tokens
    return Packed(
        buffer.getvalue(), tuple(pickler.tensors), tokens=frozenset(tokens), what="args", alive=tuple(tokens.values())
    )


class _NeedsMoreError(Exception):
    """Something is neither plain, nor captured, nor a tensor."""


class _ReferencesPickler(pickle.Pickler):
    """Of plain values, tensors and captured objects, in the form of `ObjectPickler`, which takes ten times as long."""

    def __init__(self, buffer: io.BytesIO, catalog: Catalog) -> None:
        super().__init__(buffer, protocol=5)
        self._catalog = catalog
        self._indices: dict[int, int] = {}
        self.tokens: dict[Token, object] = {}
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if type(value) in _SIMPLE:
            return self._catalog.address(value) if type(value) is int else None
        token = None if isinstance(value, type | types.FunctionType) else self._catalog.refer_to(value)
        if token is not None:
            self.tokens[token] = value
            return "ref", token
        if type(value) is not torch.Tensor or value.requires_grad or not is_dense(value):
            raise _NeedsMoreError
        known = self._indices.get(id(value))
        if known is None:  # `dump` holds what it has met, so no other tensor gets this id
            known = self._indices[id(value)] = len(self.tensors)
            self.tensors.append(snapshot(value))
        return "data", known, value.device.type != "cpu"


_SIMPLE = ATOMS | {tuple, list, dict}


def unpack(packed: Packed, world: World) -> Any:
    """The function or the arguments, on a worker, over that worker's copies of the captured objects.

    Raises:
        FunctionError: it refers to what this worker lacks: an increment not loaded, a module not installed.
    """
    if not packed.tokens and not packed.tensors:
        return world.unpickle_plain(packed.blob, packed.what)
    return world.unpickle(packed.blob, packed.tensors, packed.buffers, packed.what)


def pack_result(value: object, world: World, what: str = "result") -> Packed:
    """Make what a function returned ready for the coordinator. On the worker.

    All tensors, captured parameters among them, go as plain copies of their values on the CPU, without history; so does
    a `torchstrat.Variable`.

    Raises:
        NotSendableError: a part cannot travel, such as a captured module; the message names the path to it.
    """
    if value is None:
        return _NONE
    if is_plain(value):
        return Packed(plain.dumps(value), what=what)
    # cloudpickle is loaded when it is needed
    from torchstrat.parameter_server.serialization.pickler import ObjectPickler

    pickler = ObjectPickler(_Returning(world))
    try:
        blob = pickler.pickle(value)
    except Exception as error:
        culprit, reason = culprit_of(error, pickler.last)
        where = path_to(value, what, lambda found: found is culprit)
        raise not_sendable(where or f"{what}: something in it", culprit, reason, "the coordinator") from error
    return Packed(blob, pickler.tensors, pickler.buffers, what=what)


def unpack_result(packed: Packed) -> object:
    """What a function returned, on the coordinator."""
    if not packed.tensors and plain.holds_no_class_of_a_program(packed.blob):
        return pickle.loads(packed.blob)
    from torchstrat.parameter_server.serialization.pickler import ResultUnpickler

    return ResultUnpickler(packed.blob, packed.tensors, packed.buffers, _unknown, torch.device("cpu")).load()


_NO_ARGUMENTS = Packed(plain.dumps(((), {})), what="args")
_NONE = Packed(plain.dumps(None), what="result")
"""What most functions return that are scheduled for what they do."""


def _unknown(reference: object) -> object:
    raise pickle.UnpicklingError(f"a result holds a reference, {reference!r}, and results hold none.")


class _Returning:
    """What goes as a reference in a result: nothing. Tensors are made plain."""

    makes_plain = True

    def __init__(self, world: World) -> None:
        self._world = world

    def reference_to(self, value: object) -> tuple[object, ...] | None:
        if isinstance(value, torch.Tensor | TensorLike):
            return None
        token = self._world.token_of(value)
        if token is None:
            reason = refusal(value)
        elif isinstance(value, nn.Module):
            reason = "it is captured, and the coordinator has its own. Return its state_dict(), or numbers made of it."
        elif isinstance(value, Optimizer):
            reason = "it is captured, and the coordinator has its own. Return what is wanted of it, such as its rate."
        else:
            reason = "it belongs to this worker. Return values, not what they come from."
        if reason is not None:
            raise Refused(value, reason)
        return None

    def address(self, value: int) -> None:
        return None

    def by_value(self, value: object) -> bool:
        return False

    def note_name(self, value: object) -> None:
        pass

    def names_used(self) -> frozenset[str]:
        return frozenset()


def _warn_of_size(value: object, name: str, packed: Packed, catalog: Catalog, references: Outgoing) -> None:
    code = getattr(value, "__code__", None)
    key = code if isinstance(code, types.CodeType) else name
    if key in catalog.warned:
        return
    catalog.warned.add(key)
    path, size = max(_data_in(value, name, references), key=lambda found: found[1], default=(name, packed.nbytes))
    warnings.warn(
        f"{name} takes {packed.nbytes / 2**20:.0f} MiB of data along to every worker, most of it as {path} "
        f"({size / 2**20:.0f} MiB). Let each worker read its own data with coordinator.create_per_worker_dataset, or "
        "create what is part of the model inside `with strategy.scope():`.",
        stacklevel=3,
    )


def _data_in(value: object, name: str, references: Outgoing) -> Iterator[tuple[str, int]]:
    """Tensors, arrays and frozen modules that are sent by value: the path to each, and its bytes."""

    def enters(part: object) -> bool:
        return not isinstance(part, nn.Module) and references.enters(part)

    for path, part in paths(value, name, enters):
        if not references.enters(part):
            continue
        if isinstance(part, nn.Module):
            yield path, sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))
        elif isinstance(part, bytes | bytearray):
            yield path, len(part)
        elif isinstance(part, torch.Tensor | np.ndarray):
            yield path, part.nbytes


def pack_exception(error: BaseException, world: World) -> Raised:
    """On the worker, with its traceback as a note.

    What cannot travel arrives as the error's text in a `FunctionError`, and so does what would end the coordinator:
    ``sys.exit()`` in a function.
    """
    shorten(error)
    note = f"on the worker:\n{''.join(traceback.format_exception(error))}"
    as_text = _noted(FunctionError(f"{type(error).__name__}: {error}"), note)
    if not isinstance(error, Exception):
        return Raised(as_text)
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if _is_alike(copy, error):
            return Raised(_noted(copy, note))
    what = f"the {type(error).__name__} raised"
    with contextlib.suppress(Exception):
        kind, args, state = in_parts(error)
        with contextlib.suppress(NotSendableError):
            return Raised(as_text, pack_result((kind, args, state, note), world, what=what))
        state, left = _sendable(state, world)
        note += f"attributes that could not travel: {', '.join(left)}"
        return Raised(as_text, pack_result((kind, args, state, note), world, what=what))
    return Raised(as_text)


def unpack_exception(raised: Raised, unpack: Callable[[Packed], Any]) -> BaseException:
    """On the coordinator."""
    if raised.packed is not None:
        with contextlib.suppress(Exception):
            kind, args, state, note = unpack(raised.packed)
            error = from_parts(kind, args)
            if state is not None:
                error.__setstate__(state)
            return _noted(error, note)
    return raised.error


def _sendable(state: Any, world: World) -> tuple[object, list[str]]:
    """The attributes that can travel, and the names of the others."""
    kept: dict[str, object] = {}
    for name, value in state.items():
        with contextlib.suppress(NotSendableError):
            pack_result(value, world)
            kept[name] = value
    return kept, sorted(state.keys() - kept.keys())


def _is_alike(copy: BaseException, error: BaseException) -> bool:
    """A class whose arguments are not those of `Exception` is often made again with other ones, silently."""
    return type(copy) is type(error) and str(copy) == str(error) and len(copy.args) == len(error.args)


def _noted(error: BaseException, note: str) -> BaseException:
    if hasattr(error, "add_note"):
        error.add_note(note)
    return error
