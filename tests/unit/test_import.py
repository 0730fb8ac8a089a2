"""Importing torchstrat is free: no optional dependency, no device, no environment variable, no thread."""

from __future__ import annotations

import contextlib
import gc
import graphlib
import importlib
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import PYTHON, ROOT, succeed
from torchstrat.core import without_collection

FORBIDDEN = ["torch.distributed.rpc", "torch.distributed.tensor", "cloudpickle", "torch_xla", "hydra", "omegaconf"]
FORBIDDEN += ["sklearn", "matplotlib", "tensorboard", "tqdm"]
FORBIDDEN += [f"torchstrat.{part}" for part in ("app", "launch", "testing")]  # what few programs need

PROBE = textwrap.dedent(
    """
    import builtins, gc, json, os, sys, threading

    import torch  # what torch itself reads and imports is not ours
    import numpy

    before = set(sys.modules)
    threads = threading.active_count()
    collections = sum(generation["collections"] for generation in gc.get_stats())
    reads, devices = [], []

    class Watched(dict):
        def __iter__(self):
            reads.append("all of it")
            return dict.__iter__(self)

    def noting(name):
        def noted(self, key, *default):
            reads.append(key)
            return getattr(dict, name)(self, key, *default)
        return noted

    for name in ("__getitem__", "__contains__", "get"):
        setattr(Watched, name, noting(name))

    def watch(module, name):
        original = getattr(module, name)

        def watched(*args, **kwargs):
            devices.append(name)
            return original(*args, **kwargs)

        setattr(module, name, watched)

    for name in ("is_available", "device_count", "init", "current_device"):
        watch(torch.cuda, name)
    for name in ("is_available", "current_accelerator", "device_count"):
        watch(torch.accelerator, name)
    environment = dict(os.environ)
    os.environ = Watched(environment)
    os.getenv = os.environ.get

    __import__(sys.argv[1])

    print(json.dumps({
        "modules": sorted(set(sys.modules) - before),
        "all modules": sorted(sys.modules),
        "reads": reads,
        "written": {k: v for k, v in os.environ.items() if environment.get(k) != v},
        "devices": devices,
        "threads": threading.active_count() - threads,
        "collects": gc.isenabled(),
        "collections": sum(generation["collections"] for generation in gc.get_stats()) - collections,
    }))
    """
)


def _import(module: str, **more: str) -> dict[str, Any]:
    odd = {"TF_CONFIG": "not json", "WORLD_SIZE": "not a number", "RANK": "-1"}
    return json.loads(succeed(*PYTHON, "-c", PROBE, module, seconds=55, **odd, **more).stdout)


def test_the_probe_would_notice(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "import os, threading, time, torch, hydra\n"
        "os.environ.get('WORLD_SIZE'); os.environ['GREEDY'] = '1'; torch.cuda.is_available()\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
    )
    found = _import("greedy", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert "hydra" in found["modules"]
    assert "WORLD_SIZE" in found["reads"]
    assert found["written"] == {"GREEDY": "1"}
    assert "is_available" in found["devices"]
    assert found["threads"] == 1


def test_nothing_is_imported_read_touched_or_started() -> None:
    found = _import("torchstrat")
    # torch may bring some of these itself: then that is its doing, and another test would have to say so
    assert not [name for name in found["modules"] for part in FORBIDDEN if f"{name}.".startswith(f"{part}.")]
    assert [found[what] for what in ("reads", "written", "devices", "threads")] == [[], {}, [], 0]
    assert found["collects"]
    assert found["collections"] <= 1  # before torchstrat/__init__.py has said so


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_made_meanwhile_counts_as_old_without_having_been_looked_at() -> None:
    frozen, collections = gc.get_freeze_count(), sum(generation["collections"] for generation in gc.get_stats())
    with without_collection():
        made: list[list[int]] = [[] for _ in range(10_000)]
    assert gc.get_freeze_count() == frozen == 0
    assert sum(generation["collections"] for generation in gc.get_stats()) - collections <= 1
    oldest = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in oldest for one in made)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), without_collection():
            assert not gc.isenabled()
            with without_collection():
                pass
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_no_import_goes_round_in_a_circle() -> None:
    """Also none within a function, or for types alone. `scripts/check` has the directions between rooms."""
    imports = _imports()
    imports["torchstrat"].remove("torchstrat.testing")  # for types: it is found at first use, and uses public names
    graphlib.TopologicalSorter(imports).prepare()


def test_folders_say_what_they_import() -> None:
    """The last sentence of each: other rooms by their names, folders of the same room by theirs."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "torchstrat").rglob("__init__.py")}

    def folder_of(module: str) -> str:
        path = module.replace(".", "/")
        return path if path in folders else path.rpartition("/")[0]

    seen: dict[str, set[str]] = {folder: set() for folder in folders - {"torchstrat"}}
    for module, imported in _imports().items():
        own = folder_of(module)
        for other in map(folder_of, imported if own != "torchstrat" else ()):
            room, same = other.split("/")[1:2], own.split("/")[1] in other.split("/")[1:2]
            if not f"{other}/".startswith(f"{own}/"):
                seen[own].add(other.removeprefix("torchstrat/") if same or not room else room[0])
    for folder, imported in seen.items():
        said = importlib.import_module(folder.replace("/", ".")).__doc__ or ""
        last = re.search(r"\nImports from ([^.]*)\.\n?\Z", said)
        assert last is not None, f"{folder}: the docstring does not end with what it imports from"
        assert set(re.findall(r"`([^`]+)`", last[1])) == imported, folder


def _imports() -> dict[str, set[str]]:
    """By module; also those within functions, and for types alone."""
    grimp = pytest.importorskip("grimp", reason="of the extra dev")
    graph = grimp.build_graph("torchstrat", cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
