"""An optimizer in a checkpoint: its state by the names of its parameters, and its parameter groups.

The layout is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``:
``state.<parameter>.<entry>`` and ``param_groups.<number>.<option>``, where ``params`` lists parameters by name. A
parameter's name is the one that a module of the same checkpoint gives it; with the module's name before it where the
optimizer steps parameters of several, and its number where no module has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.checkpoint.items import Item, Reads, StatefulItem, TensorsItem, Want, Writes
from torchstrat.checkpoint.pieces import KeyPath, Piece, goes_by_rows, is_block, key_of
from torchstrat.checkpoint.remote import RemoteSlot, RemoteState, Servers
from torchstrat.core import _torch_private
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.optimizers import hyperparameters, is_listed, kind_of, state_dict_of
from torchstrat.core.values import misfit
from torchstrat.core.variable.tensor_like import TensorInShards
from torchstrat.core.variable.variable import Variable

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import Stored
    from torchstrat.checkpoint.pieces import Comparison


OTHER_STATE = "other_state"
"""Of an optimizer, what its ``state`` has under other keys than parameters."""

untouched_rows: Callable[[Optimizer, int, torch.Tensor], dict[str, object]] | None = None
"""The state of rows that an optimizer has in a group and has never stepped. The room that steps rows puts it here."""


class OptimizerItem:
    def __init__(
        self, name: str, optimizer: Optimizer, tensors: Sequence[TensorsItem], servers: Servers | None
    ) -> None:
        self.name = name
        self._optimizer = optimizer
        self._servers = servers
        self._number = None if servers is None else servers.number_of(optimizer)
        self._parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._pieces, self._keys = _named(name, self._parameters, tensors)

    # -- on servers -------------------------------------------------------------------------------------------------

    def remote_slots(self) -> list[RemoteSlot]:
        return []

    def remote_states(self) -> list[RemoteState]:
        if self._number is None or self._servers is None:
            return []
        pairs = zip(self._parameters, self._pieces, strict=True)
        specs = [(self._servers.spec_of(tensor), piece) for tensor, piece in pairs]
        return [RemoteState(self._number, spec, piece) for spec, piece in specs if spec is not None]

    # -- writing ----------------------------------------------------------------------------------------------------

    def writes(self) -> Writes:
        writes = Writes()
        packed: dict[str, Any] = {}
        if self._number is None:
            packed = self._packed()
            whole: set[KeyPath] = set()
            for number, (parameter, piece) in enumerate(zip(self._parameters, self._pieces, strict=True)):
                self._write_state(packed["state"].get(number), parameter, piece, writes, whole)
        elif _torch_private.saves_more(self._optimizer):  # else nothing of it has to come from the servers
            packed = self._packed()
        known = ("state", "param_groups")
        writes.values += [((self.name, key), value) for key, value in packed.items() if key not in known]
        held = dict.items(self._optimizer.state)  # here: that of parameter servers would ask them for the rest
        others = {key: value for key, value in held if not isinstance(key, torch.Tensor)}
        if others:
            writes.values.append(((self.name, OTHER_STATE), others))
        for number, group in enumerate(self._optimizer.param_groups):
            options = {**hyperparameters(group), "params": self._names(number)}
            writes.values += [((self.name, "param_groups", number, key), value) for key, value in options.items()]
        writes.replicated = frozenset(piece.path for piece, _ in writes.tensors)
        return writes

    def _packed(self) -> dict[str, Any]:
        packed = state_dict_of(self._optimizer)
        if isinstance(packed, dict) and isinstance(packed.get("state"), Mapping):
            return packed
        raise UnsupportedError(
            f"the state_dict() of {self.name}, a {type(self._optimizer).__name__}, is of another form than that of "
            "torch.optim.Optimizer, so its state has no parameters' names. Give Checkpoint the optimizers that it is "
            "made of, each by its name; or an object of your own with state_dict() and load_state_dict()."
        )

    def _write_state(
        self, state: Any, parameter: torch.Tensor, piece: Piece, writes: Writes, whole: set[KeyPath]
    ) -> None:
        """``whole``: entries, not cut with the parameter, that another shard of it has written already."""
        shape = tuple(parameter.shape)
        if state is None and shape != piece.shape and self._others_have_state(piece):
            state = self._untouched_state(parameter)
        for name, value in (state or {}).items():
            path = (*piece.path, name)
            if goes_by_rows(value, shape[0] if shape else 1, shape):
                writes.tensors.append((piece.entry(name, (piece.shape[0], *value.shape[1:])), value))
            elif path not in whole:
                whole.add(path)
                if is_block(value):
                    writes.tensors.append((Piece(path, tuple(value.shape)), value))
                else:
                    writes.values.append((path, value))

    def _others_have_state(self, piece: Piece) -> bool:
        pairs = zip(self._parameters, self._pieces, strict=True)
        return any(other.path == piece.path and self._optimizer.state.get(tensor) for tensor, other in pairs)

    def _untouched_state(self, shard: torch.Tensor) -> dict[str, object]:
        """Of a shard of a `ShardedVariable` that no step has changed yet, while others have been stepped."""
        groups = self._optimizer.param_groups
        number = next(n for n, group in enumerate(groups) if any(shard is one for one in group["params"]))
        assert untouched_rows is not None
        return untouched_rows(self._optimizer, number, shard.detach().cpu())

    def parameter_names(self) -> list[list[str]]:
        """By group, as ``params`` has them in a checkpoint."""
        return [self._names(group) for group in range(len(self._optimizer.param_groups))]

    def _names(self, group: int) -> list[str]:
        """Each whole variable once, in the order of the group's parameters."""
        first = sum(len(other["params"]) for other in self._optimizer.param_groups[:group])
        count = len(self._optimizer.param_groups[group]["params"])
        return list(dict.fromkeys(str(piece.path[-1]) for piece in self._pieces[first : first + count]))

    # -- reading ----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return [f"{self.name}.param_groups", *(piece.key for piece in self._pieces)]

    def reads(self, stored: Stored, comparison: Comparison) -> Reads:
        there = stored.under(self.name)
        if not there and comparison.takes(self.name):
            comparison.missing(self.name)
            return Reads()
        state_paths: list[KeyPath] = []
        other_paths: list[KeyPath] = []
        for key, path in there.items():
            if not comparison.takes(self._unit(path)):
                continue
            if len(path) == 4 and path[1] == "state":
                state_paths.append(path)
            elif len(path) == 2 or (len(path) == 4 and path[1] == "param_groups"):
                other_paths.append(path)
            else:
                comparison.unexpected(key)
        groups = self._stored_groups(stored) if any(map(comparison.takes, self.names())) else {}
        if comparison.takes(f"{self.name}.param_groups") and not self._fits_groups(groups, comparison):
            other_paths = [path for path in other_paths if path[1] != "param_groups"]
        by_name = self._by_name(stored, state_paths, {name for names in groups.values() for name in names}, comparison)
        wants: list[Want] = [(Piece(path, ()), None) for path in other_paths]
        if self._number is not None:
            pairs = [(state, by_name.get(str(state.piece.path[-1]))) for state in self.remote_states()]
            states = [(state, tuple(paths)) for state, paths in pairs if paths is not None]
            return Reads(wants, lambda values: self._put_options(other_paths, values), states=states)
        places: list[tuple[int, str]] = []
        replaced: set[int] = set()
        for number, (parameter, piece) in enumerate(zip(self._parameters, self._pieces, strict=True)):
            paths = by_name.get(str(piece.path[-1]))
            if paths is not None:
                replaced.add(number)
                for path in paths:
                    places.append((number, str(path[-1])))
                    rows = int(parameter.shape[0]) if parameter.dim() else None
                    wants.append(want_of_entry(stored, path, piece, rows))
        if not wants and not replaced:
            return Reads()
        return Reads(wants, lambda values: self._put(other_paths, places, values, replaced))

    def _unit(self, path: KeyPath) -> str:
        """The name of what a value is a part of, that can be restored by itself."""
        if path[1] == "state" and len(path) == 4:
            return Piece(path[:3], ()).key
        if path[1] == "param_groups":
            return f"{self.name}.param_groups"
        return f"{self.name}.state" if path[1] == OTHER_STATE else self.name

    def _by_name(
        self, stored: Stored, paths: Sequence[KeyPath], stepped: Collection[str], comparison: Comparison
    ) -> dict[str, list[KeyPath]]:
        """The entries of the checkpoint, by the parameters whose state they are to replace: of none where it has none.

        The state of other parameters stays: of those that are not asked for, or that it knows nothing of. ``stepped``:
        the parameters that the optimizer had.
        """
        units = {str(piece.path[-1]): piece for piece in self._pieces if comparison.takes(piece.key)}
        by_name: dict[str, list[KeyPath]] = {name: [] for name in units}
        for path in paths:
            if str(path[2]) in by_name:
                by_name[str(path[2])].append(path)
            else:
                comparison.unexpected(Piece(path, ()).key)
        is_told = comparison.is_strict and comparison.takes(f"{self.name}.param_groups")  # that these differ
        for name, piece in units.items():
            if not by_name[name] and name not in stepped:
                del by_name[name]
                if not is_told:
                    comparison.missing(piece.key)
        for piece in self._pieces:
            name = str(piece.path[-1])
            if name in by_name and not self._fits_state(stored, piece, by_name[name], comparison):
                del by_name[name]
        return by_name

    def _stored_groups(self, stored: Stored) -> dict[object, list[str]]:
        """By group, the parameters that the optimizer had, by their names."""
        from torchstrat.checkpoint.files import read

        groups = [path for path in stored.under(self.name).values() if path[1] == "param_groups" and len(path) == 4]
        paths = [path for path in groups if path[3] == "params"]
        wanted: list[Want] = [(Piece(path, ()), None) for path in paths]
        return {path[2]: [str(name) for name in names] for path, names in zip(paths, read(stored, wanted), strict=True)}

    def _fits_groups(self, stored: Mapping[object, list[str]], comparison: Comparison) -> bool:
        own = dict(enumerate(self.parameter_names()))
        name, fits = f"{self.name}.param_groups", True
        if stored.keys() != own.keys():
            problem = f"{self.name} has {len(stored)} parameter groups in the checkpoint and {len(own)} in the program"
            comparison.differs(name, problem)
            return False
        for number, names in own.items():
            if stored[number] != names:
                fits = False
                where = Piece((self.name, "param_groups", number, "params"), ()).key
                there, here = _shown(stored[number]), _shown(names)
                comparison.differs(name, f"{where} is {there} in the checkpoint and {here} in the program")
        return fits

    def _fits_state(self, stored: Stored, piece: Piece, paths: Sequence[KeyPath], comparison: Comparison) -> bool:
        may_be_a_mean = not kind_of(self._optimizer).may_cut_rows  # over all rows, as one of Adafactor's is
        fits, own = True, self._keys[piece.path]
        for path in paths:
            key, shape = key_of(path), stored.shape(key_of(path))
            if shape and shape[0] == 1 and may_be_a_mean:
                continue
            if shape and len(shape) == len(piece.shape) and shape != piece.shape and shape[0] != piece.shape[0]:
                fits = False
                problem = f"{key} has shape {shape} in the checkpoint, and its parameter {piece.shape} in the program"
                comparison.differs(piece.key, problem)
        if paths and fits and own in stored.paths and stored.shape(own) != piece.shape:  # of as many rows
            fits = False
            problem = f"{piece.key} is of shape {stored.shape(own)} in the checkpoint, {piece.shape} in the program"
            comparison.differs(piece.key, problem)
        return fits

    def _put_options(self, paths: Sequence[KeyPath], values: Sequence[Any]) -> None:
        groups = self._optimizer.param_groups
        has_groups = any(path[1] == "param_groups" for path in paths)
        if has_groups and not is_listed(type(self._optimizer)):
            # As load_state_dict does: its steps may have set more by now.
            for group in groups:
                for name in set(group) - {"params"}:
                    del group[name]
        more: dict[str, object] = {}
        for path, value in zip(paths, values, strict=False):
            if path[1] == OTHER_STATE:
                self._optimizer.state.update(value)
            elif path[1] != "param_groups":
                more[str(path[1])] = value
            elif path[3] != "params":
                groups[int(path[2])][str(path[3])] = value
        if more:  # only the class knows what to do with it
            self._optimizer.load_state_dict({**state_dict_of(self._optimizer), **more})
        if self._servers is not None and paths:
            self._servers.push_options(self._optimizer)

    def _put(
        self, paths: Sequence[KeyPath], places: Sequence[tuple[int, str]], values: Sequence[object], replaced: set[int]
    ) -> None:
        """``replaced``: the numbers of the parameters whose state is to be that of ``places``."""
        packed = state_dict_of(self._optimizer)
        is_whole = len(replaced) == len(self._parameters)  # what has other keys than parameters goes with it
        held = {} if is_whole else packed["state"]
        packed["state"] = {number: state for number, state in held.items() if number not in replaced}
        for path, value in zip(paths, values, strict=False):
            if path[1] == OTHER_STATE:
                packed["state"].update(value)
            elif path[1] != "param_groups":
                packed[str(path[1])] = value
            elif path[3] != "params":
                packed["param_groups"][int(path[2])][str(path[3])] = value
        for (number, entry), value in zip(places, values[len(paths) :], strict=True):
            packed["state"].setdefault(number, {})[entry] = value
        self._optimizer.load_state_dict(packed)


def want_of_entry(stored: Stored, path: KeyPath, piece: Piece, rows: int | None) -> Want:
    """An entry of the state of ``piece``, which has that many ``rows``: its part of what goes by rows, else all."""
    shape = stored.shape(Piece(path, ()).key)
    if shape and piece.shape and (shape == piece.shape or (piece.shape[0] > 1 and shape[0] == piece.shape[0])):
        return Piece(path, shape, piece.start), rows
    return Piece(path, shape or ()), None


def _named(
    name: str, parameters: Sequence[torch.Tensor], tensors: Sequence[TensorsItem]
) -> tuple[list[Piece], dict[KeyPath, str]]:
    """Where the state of each parameter is; and, by these paths, the names of the parameters themselves."""
    found: dict[int, tuple[str, str, Piece]] = {}
    for item in tensors:
        for part in item.parts:
            inside = ".".join(map(str, part.piece.path[1:]))
            found.setdefault(id(part.holder), (item.name, inside, part.piece))
    owners = {found[id(tensor)][0] for tensor in parameters if id(tensor) in found}

    def label_of(tensor: torch.Tensor) -> str:
        owner, inside, _ = found[id(tensor)]
        return (inside or owner) if len(owners) == 1 else f"{owner}.{inside}" if inside else owner

    labels = {label_of(tensor) for tensor in parameters if id(tensor) in found}
    pieces, keys = [], {}
    for number, tensor in enumerate(parameters):
        if id(tensor) not in found:
            label = f"unnamed_{number}" if str(number) in labels else str(number)  # as in an `nn.ParameterList`
            pieces.append(Piece((name, "state", label), tuple(tensor.shape)))
            keys[pieces[-1].path] = ""
            continue
        _, _, piece = found[id(tensor)]
        pieces.append(Piece((name, "state", label_of(tensor)), piece.shape, piece.start))
        keys[pieces[-1].path] = piece.key
    return pieces, keys


def _shown(names: Sequence[str]) -> str:
    return f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''} ({len(names)})"


def _saves_as_modules_do(module: nn.Module) -> bool:
    """Whether its ``state_dict()`` and ``load_state_dict()`` take what PyTorch's do. Its own, which do not (they save
    adapters only, say), decide what is saved, and are called as those of any other object."""
    if isinstance(module, TensorInShards):
        return True
    saves = misfit(module.state_dict, prefix="", keep_vars=True) is None
    return saves and misfit(module.load_state_dict, {}, strict=False) is None


def make_items(objects: Mapping[str, object], servers: Servers | None) -> list[Item]:
    """Raises `InvalidArgumentError` for an object that has no state to save."""
    tensors: dict[str, TensorsItem] = {}
    for name, value in objects.items():
        if isinstance(value, Variable | torch.Tensor) or (isinstance(value, nn.Module) and _saves_as_modules_do(value)):
            tensors[name] = TensorsItem(name, value, servers)
    items: list[Item] = []
    for name, value in objects.items():
        if name in tensors:
            items.append(tensors[name])
        elif isinstance(value, Optimizer):
            items.append(OptimizerItem(name, value, list(tensors.values()), servers))
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            items.append(StatefulItem(name, value))
        else:
            raise InvalidArgumentError(
                f"Checkpoint({name}=…) got {type(value).__name__} {value!r:.80}. It takes modules, optimizers, "
                "ts.Variable, ts.ShardedVariable, tensors, and objects with state_dict() and load_state_dict(). Make a "
                "number a tensor or a ts.Variable, and keep its object: it is restored in place."
            )
    return items
