"""Importing torchstrat is free: no optional dependency, no device, no environment variable, no thread."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap

import pytest

from torchstrat._importing import without_collection

FORBIDDEN = [
    "torch.distributed.rpc",
    "torch.distributed.tensor",
    "cloudpickle",
    "torch_xla",
    "hydra",
    "omegaconf",
    "sklearn",
    "matplotlib",
    "tensorboard",
    "tqdm",
]

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
        def __getitem__(self, name):
            reads.append(name)
            return dict.__getitem__(self, name)

        def get(self, name, default=None):
            reads.append(name)
            return dict.get(self, name, default)

        def __contains__(self, name):
            reads.append(name)
            return dict.__contains__(self, name)

        def __iter__(self):
            reads.append("all of it")
            return dict.__iter__(self)


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


def _import(module: str) -> dict:
    environment = {**os.environ, "TF_CONFIG": "not json", "WORLD_SIZE": "not a number", "RANK": "-1"}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, module], env=environment, capture_output=True, text=True, timeout=55, check=False
    )
    assert probe.returncode == 0, probe.stderr
    return json.loads(probe.stdout)


@pytest.fixture(scope="module")
def imported() -> dict:
    return _import("torchstrat")


def test_the_probe_would_notice(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(
        "import os, threading, time, torch, hydra\n"
        "os.environ.get('WORLD_SIZE'); os.environ['GREEDY'] = '1'; torch.cuda.is_available()\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = _import("greedy")
    assert "hydra" in found["modules"]
    assert "WORLD_SIZE" in found["reads"]
    assert found["written"] == {"GREEDY": "1"}
    assert "is_available" in found["devices"]
    assert found["threads"] == 1


@pytest.mark.parametrize("module", FORBIDDEN)
def test_imports_nothing_optional(imported, module):
    # torch may bring some of these itself: then that is its doing, and another test would have to say so
    assert not [name for name in imported["modules"] if name == module or name.startswith(f"{module}.")]


@pytest.mark.parametrize("part", ["experiments", "launch", "testing"])
def test_does_not_import_what_few_programs_need(imported, part):
    assert not [name for name in imported["modules"] if f"{name}.".startswith(f"torchstrat.{part}.")]


def test_reads_no_environment(imported):
    assert imported["reads"] == []
    assert imported["written"] == {}


def test_touches_no_device_and_starts_no_thread(imported):
    assert imported["devices"] == []
    assert imported["threads"] == 0


def test_collects_no_garbage_meanwhile_and_does_afterwards(imported):
    assert imported["collects"]
    assert imported["collections"] <= 1  # before torchstrat/__init__.py has said so


def test_what_was_made_meanwhile_counts_as_old_without_having_been_looked_at():
    frozen, collections = gc.get_freeze_count(), sum(generation["collections"] for generation in gc.get_stats())
    with without_collection():
        made = [[] for _ in range(10_000)]
    assert gc.get_freeze_count() == frozen == 0
    assert sum(generation["collections"] for generation in gc.get_stats()) - collections <= 1
    oldest = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in oldest for one in made)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled):
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
