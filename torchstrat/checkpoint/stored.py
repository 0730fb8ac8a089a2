"""Opening a checkpoint: it is there, complete, and its index is what was written. Or a plain ``state_dict`` file.

Where restoring has failed, `damage_of` tells whether the checkpoint is what was written, or an older one may help.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchstrat.checkpoint.folder import existing, is_checkpoint
from torchstrat.checkpoint.items import Item, TensorsItem, Versions, versions_of, versions_path
from torchstrat.checkpoint.manifest import FORMAT, NAME, check_file, read_manifest
from torchstrat.checkpoint.numbered import NumberedCheckpoints
from torchstrat.checkpoint.optimizer_item import OTHER_STATE, OptimizerItem
from torchstrat.checkpoint.pieces import OWN, STRUCTURE, KeyPath, Piece, flatten, is_block, key_of, structure_of
from torchstrat.checkpoint.reading import INDEX, Stored, StoredFolder
from torchstrat.checkpoint.safetensors_file import mapped, versions_in
from torchstrat.core.errors import InvalidArgumentError

__all__ = ["INDEX", "Stored", "damage_of", "open_checkpoint"]


def open_checkpoint(path: Path) -> Stored:
    """Reads the index; tensors stay where they are. Raises `InvalidArgumentError` for an incomplete checkpoint."""
    if path.is_file():
        return open_plain(path)
    _require_not_of_several(path)
    folder = existing(path)
    manifest = read_manifest(folder)
    files = {} if manifest is None else manifest["files"]
    if INDEX in files:
        check_file(folder / INDEX, files[INDEX])
    if manifest is not None and manifest["format"] > 1 and manifest["byteorder"] == sys.byteorder:
        return StoredFolder(folder, files)
    # Imported here: what torchstrat writes now is read without it.
    from torchstrat.checkpoint.torch_folder import open_torch_folder

    return open_torch_folder(folder, files)


def _require_not_of_several(path: Path) -> None:
    """The directory of a `CheckpointManager` is an easy mistake."""
    if not path.is_dir() or is_checkpoint(path):
        return
    numbered = NumberedCheckpoints(path)
    if steps := numbered.steps():
        newest = numbered.path(steps[-1])
        raise InvalidArgumentError(
            f"{path} is no checkpoint, but a folder that has some, such as {newest.name}, its newest: give {newest}, "
            f"or let CheckpointManager({path.name!r}).restore(checkpoint) choose."
        )


def damage_of(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``, with the name of the file; None where nothing is. Reads all of it.

    One that a later version of torchstrat has written is not damaged. Of one without checksums (another program's) only
    the index can be told to be readable.
    """
    if _is_of_later_version(path):
        return None
    try:
        folder = open_checkpoint(path).folder
        manifest = read_manifest(folder)
        for name, check in manifest["files"].items() if manifest is not None else ():
            check_file(folder / name, check)
    except InvalidArgumentError as error:
        return str(error)
    return None


def _is_of_later_version(path: Path) -> bool:
    try:
        version = json.loads((path / NAME).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(version, int) and version > FORMAT


SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class _Entry:
    """``place``: where in the file it is, for those who open it without knowing the objects; None: nowhere."""

    value: Any
    place: KeyPath | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.value if is_block(self.value) else None


@dataclass(frozen=True)
class PlainFile:
    """A file that is there to be read; does what `reading.Stored` says. ``top``: what is in it, as it is."""

    folder: Path
    entries: Mapping[KeyPath, _Entry]
    top: Any = field(repr=False)
    versions: Mapping[str, Versions] = field(default_factory=dict, repr=False)
    """Of modules by the names of objects, where ``top`` does not have them."""
    paths: Mapping[str, KeyPath] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", {key_of(path): path for path in self.entries})

    def _entry(self, key: str) -> _Entry:
        return self.entries[self.paths[key]]

    def shape(self, key: str) -> tuple[int, ...] | None:
        tensor = self._entry(key).tensor
        return None if tensor is None else tuple(tensor.shape)

    def dtype(self, key: str) -> torch.dtype | None:
        tensor = self._entry(key).tensor
        return None if tensor is None else tensor.dtype

    def under(self, name: str) -> dict[str, KeyPath]:
        return {key: path for key, path in self.paths.items() if path[0] == name}

    def place_of(self, piece: Piece) -> Piece:
        """What a server, which opens the file by itself and knows no objects, calls a piece."""
        place = self.entries[piece.path].place
        assert place is not None
        return Piece(place, piece.shape, piece.start)

    def read(self, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
        """See `reading.read`. A file of this kind has no checksums."""
        return [self._part(piece, rows) for piece, rows in wanted]

    def _part(self, piece: Piece, rows: int | None) -> object:
        if piece.key not in self.paths:
            raise InvalidArgumentError(f"{self.folder} has no {piece.key}; it has changed since it was opened.")
        entry = self._entry(piece.key)
        if entry.tensor is None:
            return entry.value
        part = entry.tensor
        if rows is not None and piece.shape:
            part = part[piece.start : piece.start + rows]
        return part.detach().clone(memory_format=torch.contiguous_format)

    def named(self, items: Sequence[Item]) -> PlainFile:
        """The same by the names of a checkpoint. Raises `InvalidArgumentError` where it is of no known layout."""
        return PlainFile(self.folder, dict(_Layout(self, items).entries()), self.top)


def open_plain(file: Path) -> PlainFile:
    """Raises `InvalidArgumentError` for a file that is no ``state_dict``, or damaged."""
    versions: Mapping[str, Versions] = {}
    if file.suffix == SAFETENSORS:
        top, versions = mapped(file), versions_in(file)
    else:
        top = _load(file)
    if not isinstance(top, Mapping) or not all(isinstance(key, str) for key in top):
        raise InvalidArgumentError(
            f"{file} holds a {type(top).__name__}, and no state_dict: a dict of tensors by name, or of such dicts by "
            "the names of the checkpoint's objects."
        )
    return PlainFile(file, {path: _Entry(value, path) for path, value in _leaves((), top)}, top, versions)


def _load(file: Path) -> Any:
    try:
        try:
            return _load_mapped(file, weights_only=True)
        except pickle.UnpicklingError as error:
            warnings.warn(
                f"{file} has more in it than tensors and plain values, and is read as a pickle, which runs code: do "
                f"this only with files that you trust. ({str(error).splitlines()[0]})",
                stacklevel=2,
            )
            return _load_mapped(file, weights_only=False)
    except Exception as error:  # whatever torch.load raises for bytes that are not what they were
        raise InvalidArgumentError(
            f"{file} cannot be read as a file of torch.save: {type(error).__name__}: {error}"
        ) from error


def _load_mapped(file: Path, *, weights_only: bool) -> object:
    import zipfile

    is_mappable = zipfile.is_zipfile(file)  # torch's own format before 1.6 is not
    return torch.load(file, map_location="cpu", mmap=is_mappable, weights_only=weights_only)


def _leaves(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str | int) for key in value):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    else:
        yield path, value


class _Layout:
    """What a file's contents are called in a checkpoint of these items."""

    def __init__(self, file: PlainFile, items: Sequence[Item]) -> None:
        self._file = file.folder
        self._top: Mapping[str, object] = file.top
        self._versions = file.versions
        self._items = items

    def entries(self) -> Iterator[tuple[KeyPath, _Entry]]:
        modules = [item for item in self._items if isinstance(item, TensorsItem) and item.is_module]
        names = {item.name for item in self._items}
        prefixed = {key for key in self._top if key.partition(".")[0] in names and "." in key}
        if len(modules) == 1 and self._is_of(modules[0], prefixed):
            yield from self._of_versions(modules[0].name, versions_of(self._top))
            for key, value in self._top.items():
                yield (modules[0].name, key), _Entry(value, (key,))
        elif names & self._top.keys() or not prefixed:
            self._require_some(names & self._top.keys(), modules)
            for item in self._items:
                if item.name in self._top:
                    yield from self._of_object(item, self._top[item.name])
        else:
            for item in self._items:
                yield from self._of_prefix(item)

    def _is_of(self, module: TensorsItem, prefixed: set[str]) -> bool:
        """Whether the file is that module's own ``state_dict``, rather than one by the names of objects."""
        keys = {str(part.piece.path[1]) for part in module.parts}
        stripped = {key.removeprefix(f"{module.name}.") for key in prefixed}
        return bool(keys & self._top.keys()) and len(keys & self._top.keys()) >= len(keys & stripped)

    def _require_some(self, found: set[str], modules: Sequence[Item]) -> None:
        if found:
            return
        has = ", ".join(list(self._top)[:6]) + (", …" if len(self._top) > 6 else "")
        raise InvalidArgumentError(
            f"{self._file} does not fit this program: it has {has or 'nothing'}, and neither a name of the "
            f"checkpoint's objects ({', '.join(item.name for item in self._items)})"
            + (" nor a name that its module has." if len(modules) == 1 else ".")
        )

    @staticmethod
    def _of_versions(name: str, versions: Versions | None) -> Iterator[tuple[KeyPath, _Entry]]:
        if versions is not None:
            yield versions_path(name), _Entry(versions)

    def _of_object(self, item: Item, value: object) -> Iterator[tuple[KeyPath, _Entry]]:
        name = item.name
        if isinstance(item, OptimizerItem):
            yield from self._of_optimizer(item, value)
        elif isinstance(item, TensorsItem) and isinstance(value, Mapping):
            yield from self._of_versions(name, versions_of(value))
            for key, one in value.items():
                yield (name, str(key)), _Entry(one, (name, key))
        elif isinstance(item, TensorsItem):
            yield (name,), _Entry(value, (name,))
        else:
            structure = structure_of(value)
            if structure is not None:
                yield (OWN, STRUCTURE, name), _Entry(structure)
            for path, one in flatten((name,), value).items():
                yield path, _Entry(one)

    def _of_optimizer(self, item: OptimizerItem, packed: object) -> Iterator[tuple[KeyPath, _Entry]]:
        """``optimizer.state_dict()``, whose parameters have numbers, in the order of the groups."""
        name = item.name
        if not isinstance(packed, Mapping) or not isinstance(packed.get("param_groups"), Sequence):
            raise InvalidArgumentError(f"{self._file}: {name} is no optimizer's state_dict; it has no param_groups.")
        names = item.parameter_names()
        by_number: dict[object, str] = {}
        for number, group in enumerate(packed["param_groups"]):
            in_program = names[number] if number < len(names) else []
            in_file = list(group.get("params", ()))
            labels = in_program if len(in_file) == len(in_program) else [str(one) for one in in_file]
            by_number.update(zip(in_file, labels, strict=True))
            for option, value in {**group, "params": labels}.items():
                if option != "param_names":  # they are the program's
                    yield (name, "param_groups", number, option), _Entry(value)
        others = {key: one for key, one in packed.get("state", {}).items() if not isinstance(key, int)}
        if others:
            yield (name, OTHER_STATE), _Entry(others)
        for number, state in packed.get("state", {}).items():
            if number in others:
                continue
            for entry, value in state.items():
                path = (name, "state", by_number.get(number, str(number)), entry)
                yield path, _Entry(value, (name, "state", number, entry))
        for key, value in packed.items():
            if key not in ("state", "param_groups"):
                yield (name, key), _Entry(value)

    def _of_prefix(self, item: Item) -> Iterator[tuple[KeyPath, _Entry]]:
        """Flat names: an optimizer's options are not among them, and stay what they are in the program."""
        name = item.name
        yield from self._of_versions(name, self._versions.get(name))
        if isinstance(item, TensorsItem) and name in self._top:
            yield (name,), _Entry(self._top[name], (name,))
        own = {key.removeprefix(f"{name}."): key for key in self._top if key.startswith(f"{name}.")}
        if isinstance(item, OptimizerItem) and own:
            for number, names in enumerate(item.parameter_names()):
                yield (name, "param_groups", number, "params"), _Entry(names)
        for rest, key in own.items():
            if isinstance(item, OptimizerItem) and rest.startswith("state."):
                label, _, entry = rest.removeprefix("state.").rpartition(".")
                yield (name, "state", label, entry), _Entry(self._top[key], (key,))
            else:
                yield (name, rest), _Entry(self._top[key], (key,))
