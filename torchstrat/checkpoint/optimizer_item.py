"""An optimizer in a checkpoint: its state by the names of its parameters, and its parameter groups.

The layout is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``:
``state.<parameter>.<entry>`` and ``param_groups.<number>.<option>``, where ``params`` lists parameters by name. A
parameter's name is the one that a module of the same checkpoint gives it; with the module's name before it where the
optimizer steps parameters of several, and its number where no module has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torchstrat import _torch_private
from torchstrat.checkpoint.items import Reads, RemoteSlot, RemoteState, Servers, TensorsItem, Want, Writes
from torchstrat.checkpoint.pieces import Path, Piece, goes_by_rows, is_block
from torchstrat.optimizer_tiers import is_listed, kind_of

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import Stored


OTHER_STATE = "other_state"
"""Of an optimizer, what its ``state`` has under other keys than parameters."""


class OptimizerItem:
    def __init__(
        self, name: str, optimizer: Optimizer, tensors: Sequence[TensorsItem], servers: Servers | None
    ) -> None:
        self.name = name
        self._optimizer = optimizer
        self._servers = servers
        self._number = None if servers is None else servers.number_of(optimizer)
        self._parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._pieces = _named(name, self._parameters, tensors)

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
            packed = self._optimizer.state_dict()
            whole: set[Path] = set()
            for number, (parameter, piece) in enumerate(zip(self._parameters, self._pieces, strict=True)):
                self._write_state(packed["state"].get(number), parameter, piece, writes, whole)
        elif _torch_private.saves_more(self._optimizer):  # else nothing of it has to come from the servers
            packed = self._optimizer.state_dict()
        known = ("state", "param_groups")
        writes.values += [((self.name, key), value) for key, value in packed.items() if key not in known]
        held = dict.items(self._optimizer.state)  # here: that of parameter servers would ask them for the rest
        others = {key: value for key, value in held if not isinstance(key, torch.Tensor)}
        if others:
            writes.values.append(((self.name, OTHER_STATE), others))
        for number, group in enumerate(self._optimizer.param_groups):
            options = {**{key: value for key, value in group.items() if key != "params"}, "params": self._names(number)}
            writes.values += [((self.name, "param_groups", number, key), value) for key, value in options.items()]
        writes.replicated = frozenset(piece.path for piece, _ in writes.tensors)
        return writes

    def _write_state(self, state: Any, parameter: torch.Tensor, piece: Piece, writes: Writes, whole: set[Path]) -> None:
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

    def _untouched_state(self, shard: torch.Tensor) -> dict[str, Any]:
        """Of a shard of a `ShardedVariable` that no step has changed yet, while others have been stepped."""
        from torchstrat.parameter_server.server.row_optimizer import learn_state
        from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer

        groups = self._optimizer.param_groups
        number = next(n for n, group in enumerate(groups) if any(shard is one for one in group["params"]))
        optimizer = ShardOptimizer.of(self._optimizer)
        learned = learn_state(optimizer, optimizer.options[number], number, shard.detach().cpu())
        return {name: entry.allocate(shard.detach().cpu()) for name, entry in learned.items()}

    def parameter_names(self) -> list[list[str]]:
        """By group, as ``params`` has them in a checkpoint."""
        return [self._names(group) for group in range(len(self._optimizer.param_groups))]

    def _names(self, group: int) -> list[str]:
        """Each whole variable once, in the order of the group's parameters."""
        first = sum(len(other["params"]) for other in self._optimizer.param_groups[:group])
        count = len(self._optimizer.param_groups[group]["params"])
        return list(dict.fromkeys(str(piece.path[-1]) for piece in self._pieces[first : first + count]))

    # -- reading ----------------------------------------------------------------------------------------------------

    def reads(self, stored: Stored, problems: list[str]) -> Reads:
        state_paths: list[Path] = []
        other_paths: list[Path] = []
        for key, path in stored.under(self.name).items():
            if len(path) == 4 and path[1] == "state":
                state_paths.append(path)
            elif len(path) == 2 or (len(path) == 4 and path[1] == "param_groups"):
                other_paths.append(path)
            else:
                problems.append(f"{key} is in the checkpoint and not in the program")
        self._compare_groups(stored, other_paths, problems)
        by_name: dict[str, list[Path]] = {str(piece.path[-1]): [] for piece in self._pieces}
        for path in state_paths:
            if str(path[2]) in by_name:
                by_name[str(path[2])].append(path)
            else:
                problems.append(f"{Piece(path, ()).key} is in the checkpoint and not in the program")
        for piece in self._pieces:
            self._compare_state(stored, piece, by_name[str(piece.path[-1])], problems)
        wants: list[Want] = [(Piece(path, ()), None) for path in other_paths]
        if self._number is not None:
            states = [(state, tuple(by_name[str(state.piece.path[-1])])) for state in self.remote_states()]
            return Reads(wants, lambda values: self._put_options(other_paths, values), states=states)
        places: list[tuple[int, str]] = []
        for number, (parameter, piece) in enumerate(zip(self._parameters, self._pieces, strict=True)):
            for path in by_name[str(piece.path[-1])]:
                places.append((number, str(path[-1])))
                wants.append(want_of_entry(stored, path, piece, int(parameter.shape[0]) if parameter.dim() else None))
        return Reads(wants, lambda values: self._put(other_paths, places, values))

    def _compare_groups(self, stored: Stored, paths: Sequence[Path], problems: list[str]) -> None:
        groups = self._optimizer.param_groups
        found = {path[2] for path in paths if path[1] == "param_groups" and len(path) == 4}
        if found != set(range(len(groups))):
            problems.append(
                f"{self.name} has {len(found)} parameter groups in the checkpoint and {len(groups)} in the program"
            )
            return
        from torchstrat.checkpoint.files import read

        wanted: list[Want] = [
            (Piece((self.name, "param_groups", number, "params"), ()), None) for number in range(len(groups))
        ]
        for number, ((piece, _), names) in enumerate(zip(wanted, read(stored, wanted), strict=True)):
            if list(names) != self._names(number):
                problems.append(
                    f"{piece.key} is {_shown(names)} in the checkpoint and {_shown(self._names(number))} in the program"
                )

    def _compare_state(self, stored: Stored, piece: Piece, paths: Sequence[Path], problems: list[str]) -> None:
        may_be_a_mean = not kind_of(self._optimizer).may_cut_rows  # over all rows, as one of Adafactor's is
        for path in paths:
            key = Piece(path, ()).key
            shape = stored.shape(key)
            if shape and shape[0] == 1 and may_be_a_mean:
                continue
            if shape and len(shape) == len(piece.shape) and shape != piece.shape and shape[0] != piece.shape[0]:
                problem = f"{key} has shape {shape} in the checkpoint, and its parameter {piece.shape} in the program"
                if problem not in problems:
                    problems.append(problem)

    def _put_options(self, paths: Sequence[Path], values: Sequence[Any]) -> None:
        groups = self._optimizer.param_groups
        if not is_listed(type(self._optimizer)):  # as load_state_dict does: its steps may have set more by now
            for group in groups:
                for name in set(group) - {"params"}:
                    del group[name]
        more: dict[str, Any] = {}
        for path, value in zip(paths, values, strict=False):
            if path[1] == OTHER_STATE:
                self._optimizer.state.update(value)
            elif path[1] != "param_groups":
                more[str(path[1])] = value
            elif path[3] != "params":
                groups[int(path[2])][str(path[3])] = value
        if more:  # only the class knows what to do with it
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), **more})
        if self._servers is not None:
            self._servers.push_options(self._optimizer)

    def _put(self, paths: Sequence[Path], places: Sequence[tuple[int, str]], values: Sequence[Any]) -> None:
        packed = self._optimizer.state_dict()
        packed["state"] = {}
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


def want_of_entry(stored: Stored, path: Path, piece: Piece, rows: int | None) -> Want:
    """An entry of the state of ``piece``, which has that many ``rows``: its part of what goes by rows, else all."""
    shape = stored.shape(Piece(path, ()).key)
    if shape and piece.shape and (shape == piece.shape or (piece.shape[0] > 1 and shape[0] == piece.shape[0])):
        return Piece(path, shape, piece.start), rows
    return Piece(path, shape or ()), None


def _named(name: str, parameters: Sequence[torch.Tensor], tensors: Sequence[TensorsItem]) -> list[Piece]:
    found: dict[int, tuple[str, str, Piece]] = {}
    for item in tensors:
        for part in item.parts:
            inside = ".".join(map(str, part.piece.path[1:]))
            found.setdefault(id(part.holder), (item.name, inside, part.piece))
    owners = {found[id(tensor)][0] for tensor in parameters if id(tensor) in found}
    pieces = []
    for number, tensor in enumerate(parameters):
        if id(tensor) not in found:
            pieces.append(Piece((name, "state", str(number)), tuple(tensor.shape)))
            continue
        owner, inside, piece = found[id(tensor)]
        label = (inside or owner) if len(owners) == 1 else f"{owner}.{inside}" if inside else owner
        pieces.append(Piece((name, "state", label), piece.shape, piece.start))
    return pieces


def _shown(names: Sequence[str]) -> str:
    return f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''} ({len(names)})"
