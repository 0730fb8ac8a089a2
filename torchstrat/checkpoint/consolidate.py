"""`consolidate`: a checkpoint as one plain file, for a program that has no torchstrat."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import pickle
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.checkpoint import disk
from torchstrat.checkpoint.items import Versions, versions_path, with_versions
from torchstrat.checkpoint.optimizer_item import OTHER_STATE
from torchstrat.checkpoint.pieces import (
    OWN,
    STRUCTURE,
    KeyPath,
    Piece,
    Structure,
    is_block,
    key_of,
    restructured,
    unflatten,
)
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

if TYPE_CHECKING:
    from torchstrat.checkpoint import safetensors_file
    from torchstrat.checkpoint.reading import Stored


import sys
from collections.abc import Sequence

from torchstrat.core.errors import TorchstratError
from torchstrat.core.terminal import parser_with_examples

_FORMATS = {".pt": "pt", ".pth": "pt", ".bin": "pt", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class _Slot:
    """A tensor of the checkpoint, where it goes in the file."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Held(_Slot):
    """One that is there already."""

    value: torch.Tensor


def consolidate(path: str | os.PathLike[str], out: str | os.PathLike[str], *, format: str | None = None) -> Path:  # noqa: A002  # as numpy and pandas call it
    """Write the checkpoint at ``path`` as one plain ``state_dict`` file, to be read without torchstrat::

        ts.consolidate("checkpoints/step-00001000", "model.pt")

        state = torch.load("model.pt", weights_only=True)      # elsewhere
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    Args:
        path: the folder of a checkpoint, whichever strategy wrote it, on however many servers.
        out: the file; it appears whole, in place of one that was there.
        format: ``"pt"``, for ``torch.load``: for every object of the checkpoint, under its name, what its
            ``state_dict()`` was; optimizers with numbered parameters, as PyTorch has them. Or ``"safetensors"``: all
            tensors under flat names (``model.head.weight``, ``optimizer.state.head.weight.exp_avg``) and no other
            values; objects that are more than tensors are left out, but for modules and optimizers. Of a module, extra
            state that is no tensor is left out with a warning. None: by the suffix of ``out``.

    Random numbers and counters of the job are left out; so are values of classes that ``torch.load(weights_only=True)``
    does not know, with a warning that names them. One tensor at a time is in memory, or, for a .pt file of a checkpoint
    that has sparse or quantized ones, all of them. In a .pt file the checksums that zip has are not set; torch does not
    use them. `Checkpoint.restore` reads both formats.

    Returns ``out``. Raises `InvalidArgumentError` for a format that is not known, a checkpoint that is not there or is
    damaged, and a file that cannot be written; what was at ``out`` before is still there then.
    """
    from torchstrat.checkpoint.stored import PlainFile, open_checkpoint

    for name, value in (("path", path), ("out", out)):
        if not isinstance(value, str | os.PathLike):
            raise WrongTypeError(
                f"consolidate({name}=…) must be a path; got {type(value).__name__} {value!r:.80}. Write "
                'consolidate("checkpoints/step-1000", "model.pt").'
            )
    target = Path(os.path.abspath(out))
    kind = _format_of(target, format)
    stored = open_checkpoint(Path(os.path.abspath(path)))
    if isinstance(stored, PlainFile):
        raise InvalidArgumentError(f"{path} is a plain file already; consolidate takes the folder of a checkpoint.")
    if target.is_dir():
        raise InvalidArgumentError(f"{target} is a folder; consolidate writes a file, such as {target / 'model.pt'}.")
    tree = _tree_of(stored)
    versions = _versions_of(stored)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _appears_whole(target) as unfinished:
            if kind == "pt":
                _write_pt(unfinished, stored, _plain_only(tree, ()), versions)
            else:
                _write_safetensors(unfinished, stored, tree, versions)
    except OSError as error:
        raise InvalidArgumentError(f"{target} cannot be written: {error}") from error
    return target


def _format_of(target: Path, given: str | None) -> str:
    known = sorted(set(_FORMATS.values()))
    if given is not None:
        if given not in known:
            raise InvalidArgumentError(f"format={given!r} is not known; use one of {known}.")
        return given
    if target.suffix not in _FORMATS:
        raise InvalidArgumentError(
            f"{target} does not say its format; end its name in {', '.join(_FORMATS)}, or give format={known[0]!r}."
        )
    return _FORMATS[target.suffix]


@contextlib.contextmanager
def _appears_whole(target: Path) -> Iterator[Path]:
    unfinished = target.with_name(f".{target.name}.writing-{uuid.uuid4().hex}")
    try:
        yield unfinished
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        unfinished.replace(target)
        disk.sync_folder(target.parent)
    finally:
        unfinished.unlink(missing_ok=True)


# -- what is in a checkpoint -------------------------------------------------------------------------------------------


def _tree_of(stored: Stored) -> dict[str, object]:
    """By object, what its ``state_dict()`` was, with a `_Slot` for each tensor."""
    names = dict.fromkeys(str(path[0]) for path in stored.paths.values() if path[0] != OWN)
    return {name: restructured(_structure_of(stored, name), _object_of(stored, name)) for name in names}


def _structure_of(stored: Stored, name: str) -> Structure | None:
    path: KeyPath = (OWN, STRUCTURE, name)
    [found] = stored.read([(Piece(path, ()), None)]) if key_of(path) in stored.paths else [None]
    return found


def _versions_of(stored: Stored) -> dict[str, Versions]:
    """Of modules, by the names of objects: what a ``state_dict()`` has as ``_metadata``, as far as JSON knows it."""
    paths = [path for path in stored.paths.values() if path[:2] == versions_path("")[:2]]
    read = stored.read([(Piece(path, ()), None) for path in paths])
    return {str(path[2]): json.loads(json.dumps(found, default=str)) for path, found in zip(paths, read, strict=True)}


def _object_of(stored: Stored, name: str) -> object:
    under = stored.under(name)
    others = [key for key in under if stored.shape(key) is None]
    values = dict(zip(others, stored.read([(Piece(under[key], ()), None) for key in others]), strict=True))
    leaves = {path: values[key] if key in values else _slot(stored, key, path) for key, path in under.items()}
    if any(len(path) == 4 and path[1] == "param_groups" and isinstance(path[2], int) for path in leaves):
        return _optimizer_of(leaves)
    return unflatten(leaves, depth=1)


def _slot(stored: Stored, key: str, path: KeyPath) -> _Slot:
    shape, dtype = stored.shape(key), stored.dtype(key)
    assert shape is not None
    assert dtype is not None
    return _Slot(path, shape, dtype)


def _optimizer_of(leaves: Mapping[KeyPath, Any]) -> dict[str, object]:
    """As ``optimizer.state_dict()`` has it: parameters have numbers, in the order of their groups."""
    groups: dict[int, dict[str, Any]] = {}
    for path, value in leaves.items():
        if path[1] == "param_groups":
            groups.setdefault(int(path[2]), {})[str(path[3])] = value
    numbers: dict[str, int] = {}
    for _, group in sorted(groups.items()):
        names = [str(name) for name in group["params"]]
        group["params"] = list(range(len(numbers), len(numbers) + len(names)))
        numbers.update(zip(names, group["params"], strict=True))
    state: dict[int, dict[str, object]] = {}
    for path, value in leaves.items():
        if path[1] == "state":
            state.setdefault(numbers[str(path[2])], {})[str(path[3])] = value
    rest = {str(path[1]): value for path, value in leaves.items() if path[1] not in ("state", "param_groups")}
    others = rest.pop(OTHER_STATE, {})
    in_order = [group for _, group in sorted(groups.items())]
    return {"state": {**dict(sorted(state.items())), **others}, "param_groups": in_order, **rest}


def _slots(tree: object) -> Iterator[_Slot]:
    if isinstance(tree, _Slot):
        yield tree
    elif isinstance(tree, Mapping):
        for inner in tree.values():
            yield from _slots(inner)


def _read(stored: Stored, slot: _Slot) -> torch.Tensor:
    if isinstance(slot, _Held):
        return slot.value
    [tensor] = stored.read([(Piece(slot.path, slot.shape), None)])
    found: torch.Tensor = tensor
    return found


# -- torch.save --------------------------------------------------------------------------------------------------------


_MAPPINGS = (dict, OrderedDict, Counter)
"""The classes of mappings that ``weights_only=True`` knows."""


_BASES: Mapping[type, Callable[[Any], object]] = {int: int.__int__, float: float.__float__, str: str.__str__}
"""What numpy's numbers and the members of some enumerations are besides, and how they become nothing else."""


def _plain_only(tree: object, path: KeyPath) -> object:
    """Without what ``weights_only=True`` would refuse: it would refuse the whole file. Tensors are slots then."""
    if isinstance(tree, Mapping):
        return _plain_mapping(tree, path)
    if isinstance(tree, list) and path[-1:] == ("param_groups",) and _are_mappings(tree):
        return [_plain_only(group, (*path, number)) for number, group in enumerate(tree)]
    if isinstance(tree, _Slot) or _is_plain(tree):
        return _with_slots(tree, path)
    for base, plain in _BASES.items():
        if isinstance(tree, base):
            _warn(f"{key_of(path)}, a {type(tree).__name__}, is written as the {base.__name__} that it is.")
            return plain(tree)
    _warn(f"{key_of(path)}, a {type(tree).__name__}, is left out: torch.load(weights_only=True) would refuse it.")
    return _LEFT_OUT


def _are_mappings(values: Sequence[object]) -> bool:
    return all(isinstance(one, Mapping) for one in values)


def _plain_mapping(tree: Mapping[Any, object], path: KeyPath) -> dict[object, object]:
    found = {}
    for key, one in tree.items():
        if not _is_plain(key):
            _warn(
                f"{key_of(path)} has the key {key!r}, a {type(key).__name__}, which is left out with its value: "
                "torch.load(weights_only=True) would refuse it."
            )
        elif (plain := _plain_only(one, (*path, key))) is not _LEFT_OUT:
            found[key] = plain
    kind: Any = type(tree)
    if kind in _MAPPINGS:
        return kind(found)  # type: ignore[no-any-return]
    _warn(
        f"{key_of(path)}, a {kind.__name__}, is written as a dict: torch.load(weights_only=True) does not know "
        "that class."
    )
    return found


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _with_slots(tree: Any, path: KeyPath) -> object:
    """Tensors within other values, as slots: what stands for tensors in the file has no numbers before it is filled."""
    if is_block(tree) and type(tree) is torch.Tensor and not tree.requires_grad:
        return _Held(path, tuple(tree.shape), tree.dtype, tree)
    if type(tree) in (list, tuple):
        return type(tree)(_with_slots(one, (*path, number)) for number, one in enumerate(tree))
    if type(tree) in _MAPPINGS:
        return type(tree)({key: _with_slots(one, (*path, str(key))) for key, one in tree.items()})
    return tree


_LEFT_OUT: object = object()


def _is_plain(value: object) -> bool:
    if type(value) in (type(None), bool, int, float, str):
        return True
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
        packed.seek(0)
        with warnings.catch_warnings():  # what a version says of a value is no refusal, where warnings are errors too
            warnings.simplefilter("ignore")
            torch.load(packed, weights_only=True)
    except Exception:  # whatever pickling it raises, or the refusal
        return False
    return True


def _write_pt(file: Path, stored: Stored, tree: object, versions: Mapping[str, Versions]) -> None:
    """First the file with holes where the numbers go, then these, through a mapping of it. The tensors that stand for
    them have addresses and no memory: nobody writes to theirs."""

    def whole(stands_for: Callable[[_Slot], torch.Tensor]) -> dict[str, object]:
        found = _with_tensors(tree, stands_for)
        return {name: with_versions(one, versions.get(name)) for name, one in found.items()}

    if _has_tensors(tree):  # sparse or quantized ones and parameters, which no hole can be left for
        torch.save(whole(partial(_read, stored)), file)
        return
    with torch.serialization.skip_data():
        torch.save(whole(lambda slot: torch.empty(slot.shape, dtype=slot.dtype, device="cpu")), file)
    disk.reserve(file)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(file, mmap=True, weights_only=True)
    _fill(stored, tree, mapped)


def _has_tensors(tree: object) -> bool:
    """Whether there are others than slots, wherever they are."""
    found: list[torch.Tensor] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, value: object) -> str | None:
            if isinstance(value, _Slot):
                return "slot"
            if isinstance(value, torch.Tensor):
                found.append(value)
            return None

    Finder(io.BytesIO()).dump(tree)
    return bool(found)


def _with_tensors(tree: Any, stands_for: Callable[[_Slot], torch.Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return stands_for(tree)
    if type(tree) in _MAPPINGS:
        return type(tree)({key: _with_tensors(one, stands_for) for key, one in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(_with_tensors(one, stands_for) for one in tree)
    return tree


def _fill(stored: Stored, tree: Any, mapped: Any) -> None:
    if isinstance(tree, _Slot):
        mapped.copy_(_read(stored, tree))
    elif isinstance(tree, dict):
        for key, one in tree.items():
            _fill(stored, one, mapped[key])
    elif type(tree) in (list, tuple):
        for one, of_file in zip(tree, mapped, strict=True):
            _fill(stored, one, of_file)


# -- safetensors -------------------------------------------------------------------------------------------------------


def _write_safetensors(file: Path, stored: Stored, tree: Mapping[str, Any], versions: Mapping[str, Versions]) -> None:
    from torchstrat.checkpoint import safetensors_file

    described = {}
    for name, one in tree.items():
        if name in versions:
            one = _tensors_only(name, one)
        if _is_tensors(one):
            described.update({key_of(slot.path): _described(stored, slot) for slot in _slots(one)})
    with file.open("xb") as stream:
        safetensors_file.write(stream, described, {name: one for name, one in versions.items() if name in tree})


def _tensors_only(name: str, module: Mapping[str, object]) -> dict[str, object]:
    """Of a module; what is left out is what its extra state is, which most programs can do without."""
    left_out = [
        f"{name}.{key}" for key, value in module.items() if not isinstance(value, _Slot) and not is_block(value)
    ]
    if left_out:
        warnings.warn(
            f"{', '.join(left_out[:6])}{', …' if len(left_out) > 6 else ''}: left out, since safetensors has dense "
            "tensors only; a .pt file has all of it.",
            stacklevel=2,
        )
    return {
        key: _Held((name, key), tuple(value.shape), value.dtype, value) if is_block(value) else value
        for key, value in module.items()
        if isinstance(value, _Slot) or is_block(value)
    }


def _described(stored: Stored, slot: _Slot) -> safetensors_file.Described:
    from torchstrat.checkpoint import safetensors_file

    return safetensors_file.Described(slot.shape, slot.dtype, partial(_blocks, stored, slot))


def _blocks(stored: Stored, slot: _Slot) -> Iterator[torch.Tensor]:
    yield _read(stored, slot)


def _is_tensors(tree: object) -> bool:
    """Whether it has tensors only, or is an optimizer."""
    if isinstance(tree, _Slot):
        return True
    if not isinstance(tree, dict):
        return False
    return isinstance(tree.get("param_groups"), list) or all(_is_tensors(one) for one in tree.values())


def main(words: Sequence[str]) -> int:
    """Write the checkpoint that ``words`` name as one plain file, and print the file's path."""
    parser = parser_with_examples(
        "torchstrat consolidate",
        "Write a checkpoint as one plain state_dict that needs no torchstrat. See torchstrat.consolidate.",
        (
            "torchstrat consolidate checkpoints/step-00000600 model.pt",
            "torchstrat consolidate checkpoints/step-00000600 model.safetensors",
        ),
        usage="torchstrat consolidate CHECKPOINT FILE",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder")
    parser.add_argument("file", metavar="FILE", help="whose name ends in .pt, .pth, .bin or .safetensors")
    options = parser.parse_args(words)
    try:
        sys.stdout.write(f"{consolidate(options.checkpoint, options.file)}\n")
    except TorchstratError as error:
        sys.stderr.write(f"torchstrat consolidate: {error}\n")
        return 1
    return 0
