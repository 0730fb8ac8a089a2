"""Keeping the pages of freed memory: what is asked of malloc, when, and who has the last word."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.server_stores import make_spec, new_shards
from torchstrat import Server
from torchstrat.core import kept_pages
from torchstrat.core.kept_pages import (
    StepPages,
    environment_that_keeps_pages,
    give_back_pages,
    glibc_version,
    is_wanted,
    keep_pages,
)
from torchstrat.errors import ClusterConfigError
from torchstrat.launch import LocalCluster
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.server.service import VariableServer
from torchstrat.server import main

NEW, OLD = (2, 36), (2, 35)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # <malloc.h>
ASKED = {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 2**30, M_TRIM_THRESHOLD: 2**31 - 1}
VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}


class FakeLibc:
    def __init__(self, answer: int = 1) -> None:
        self.asked: dict[int, int] = {}
        self.trimmed = 0
        self._answer = answer

    def mallopt(self, parameter: int, value: int) -> int:
        self.asked[parameter] = value
        return self._answer

    def malloc_trim(self, pad: int) -> int:
        assert pad == 0
        self.trimmed += 1
        return 1


@pytest.fixture(autouse=True)
def _as_nobody_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pages, "_keeping_libc", None)
    for name in (*VARIABLES, "TORCHSTRAT_KEEP_PAGES"):
        monkeypatch.delenv(name, raising=False)


def test_where_a_large_threshold_is_refused_nothing_is_mapped_at_all() -> None:
    libc = FakeLibc()
    keep_pages(libc, OLD, {})
    assert libc.asked == {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
    assert environment_that_keeps_pages(NEW) == VARIABLES
    old = {name: value for name, value in VARIABLES.items() if "MMAP" not in name}
    assert environment_that_keeps_pages(OLD) == {**old, "MALLOC_MMAP_MAX_": "0"}


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, None),
        ({"MALLOC_ARENA_MAX": "4"}, M_ARENA_MAX),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, M_TRIM_THRESHOLD),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.mmap_threshold=4096"}, M_MMAP_THRESHOLD),
    ],
)
def test_malloc_is_asked_for_these_three_but_for_what_the_user_has_set(
    environ: dict[str, str], left: int | None
) -> None:
    libc = FakeLibc()
    keep_pages(libc, NEW, environ)
    assert list(libc.asked.items()) == [(parameter, value) for parameter, value in ASKED.items() if parameter != left]


@pytest.mark.parametrize(
    ("version", "said"),
    [(NEW, "glibc 2.36 refuses MALLOC_ARENA_MAX=1"), (None, "the C library is not glibc")],
)
def test_where_it_cannot_be_that_is_no_error_and_is_logged(
    version: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_pages, "glibc_version", lambda: version)
    libc = FakeLibc(answer=0)
    with caplog.at_level(logging.DEBUG, "torchstrat.memory"):
        keep_pages(libc, environ={})
    assert said in caplog.text
    assert (libc.asked == {}) == (environment_that_keeps_pages(version) == {}) == (version is None)


@pytest.mark.parametrize(
    ("names", "said", "version"),
    [
        ({"CS_GNU_LIBC_VERSION": 2}, "glibc 2.36", (2, 36)),
        ({"CS_GNU_LIBC_VERSION": 2}, None, None),
        ({}, "glibc 2.36", None),
    ],
)
def test_the_version_of_the_c_library(
    names: dict[str, int], said: str | None, version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr_names", names)
    monkeypatch.setattr(os, "confstr", lambda _name: said)
    assert glibc_version() == version


def test_what_is_free_is_given_back_on_request_if_it_is_kept() -> None:
    libc = FakeLibc()
    give_back_pages()
    assert libc.trimmed == 0
    keep_pages(libc, NEW, {})
    give_back_pages()
    assert libc.trimmed == 1


def test_a_parameter_server_gives_back_once_what_large_orders_left_and_at_the_end() -> None:
    """When the next functions have ended, and not before: until then the orders' messages may be there."""
    libc, value = FakeLibc(), torch.zeros(3)
    keep_pages(libc, NEW, {})
    server, coordinator = VariableServer(), Peer(Task("chief", 0), "c" * 32, "tcp://127.0.0.1:2", "here", 2)
    handlers = server.handlers()
    trimmed = []
    orders = [("ps.create", new_shards(make_spec(0, value), value)), ("ps.catalog", None)]
    ends = [("ps.forget_below", 1), ("ps.forget_below", 2), ("ps.end_checkpoint", "token"), ("ps.forget_below", 3)]
    for name, payload in [*orders, *ends]:
        handlers[name].answer(coordinator, payload)
        trimmed.append(libc.trimmed)
    for finished in (False, True):  # it keeps its state for a coordinator that takes over
        server.coordinator_left(finished=finished)
        trimmed.append(libc.trimmed)
    assert trimmed == [0, 0, 1, 1, 1, 2, 2, 3]
    server.close()


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, True),
        (None, "", True),
        (None, "0", False),
        (None, "1", True),
        (True, "0", True),
        (False, None, False),
        (False, "1", False),
    ],
)
def test_the_argument_beats_the_environment_beats_the_default(
    argument: bool | None, variable: str | None, expected: bool
) -> None:
    assert is_wanted(argument, {} if variable is None else {"TORCHSTRAT_KEEP_PAGES": variable}) is expected


def test_another_word_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterConfigError, match="TORCHSTRAT_KEEP_PAGES='off'"):
        LocalCluster(workers=1, ps=1, env={"TORCHSTRAT_KEEP_PAGES": "off"}).start()
    monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", "no")
    with pytest.raises(ClusterConfigError, match="TORCHSTRAT_KEEP_PAGES='no': set it to 1"):
        StepPages("cpu:0")


def of_malloc(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("MALLOC", "TORCHSTRAT_KEEP"))}


TELLS = """
import json, os, sys
with open(sys.argv[1] + sys.argv[sys.argv.index("--job") + 1], "w") as pipe:
    json.dump(dict(os.environ), pipe)
"""
ON, OFF = {"TORCHSTRAT_KEEP_PAGES": "1"}, {"TORCHSTRAT_KEEP_PAGES": "0"}
KEPT = {**environment_that_keeps_pages(glibc_version()), **ON}


@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        ({}, {}, KEPT),
        (
            {"MALLOC_ARENA_MAX": "3", "MALLOC_TRIM_THRESHOLD_": "7"},
            {"env": {"MALLOC_TRIM_THRESHOLD_": "0"}},
            {**KEPT, "MALLOC_ARENA_MAX": "3", "MALLOC_TRIM_THRESHOLD_": "0"},
        ),
        ({}, {"keep_pages": False}, OFF),
        ({}, {"env": OFF}, OFF),
        (OFF, {}, OFF),
        ({}, {"env": OFF, "keep_pages": True}, KEPT),
    ],
    ids=[
        "usually",
        "with the user's own values",
        "off by argument",
        "off by env",
        "off by environment",
        "on by argument",
    ],
)
def test_workers_and_servers_start_with_these_variables_and_this_process_goes_without(
    environ: dict[str, str],
    options: dict[str, Any],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for job in ("ps", "worker"):
        os.mkfifo(tmp_path / job)
    command = [sys.executable, "-S", "-c", TELLS, f"{tmp_path}/"]
    with LocalCluster(workers=1, ps=1, server_command=command, restart=False, **options):
        assert of_malloc(os.environ) == environ
        told = [json.loads((tmp_path / job).read_text()) for job in ("ps", "worker")]
    assert [of_malloc(one) for one in told] == [expected] * 2


@pytest.mark.parametrize("off_by", ["nothing", "argument", "environment"])
def test_a_server_keeps_its_pages_before_its_service_has_threads(off_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(kept_pages, "keep_pages", lambda: calls.append("kept"))

    def make_service(_task: Any) -> Any:
        calls.append("service")
        raise ZeroDivisionError

    if off_by == "environment":
        monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", "0")
    options: dict[str, Any] = {"keep_pages": False} if off_by == "argument" else {}
    with pytest.raises(ClusterConfigError, match="'boss' is no role"):
        Server({"boss": ["h:1"]}, secret="s" * 32).start()
    made = Server({"worker": ["127.0.0.1:0"]}, secret="s" * 32, start=False, make_service=make_service, **options)
    assert calls == [], "a server that is not started, or cannot be, changes nothing"
    with pytest.raises(ZeroDivisionError):
        made.start()
    assert calls == (["kept"] if off_by == "nothing" else []) + ["service"]


@pytest.mark.parametrize(("words", "expected"), [([], None), (["--no-keep-pages"], False), (["--keep-pages"], True)])
def test_the_command_passes_it_on(words: list[str], expected: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Noted:
        def __init__(self, *_arguments: Any, keep_pages: bool | None, **_options: Any) -> None:
            asked.append(keep_pages)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(sys.modules[main.__module__], "Server", Noted)
    assert main(["--cluster", '{"ps": ["h:1"]}', "--job", "ps", "--index", "0", *words]) == 0
    assert asked == [expected]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a `StepPages` does with this process, instead of doing it."""
    calls: list[str] = []
    monkeypatch.setattr(kept_pages, "keep_pages", lambda: calls.append("keep"))
    monkeypatch.setattr(kept_pages, "give_back_pages", lambda: calls.append("give back"))
    monkeypatch.setattr(kept_pages, "_why_no_huge_pages", lambda: None)
    return calls


@pytest.mark.parametrize(
    ("device", "why_not", "said", "kept"),
    [("cpu:0", None, "", 1), ("cpu:0", "of a reason", "1", 0), ("cpu:0", None, "0", 0), ("cuda:0", None, "1", 0)],
)
def test_pages_are_kept_where_they_are_huge(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, device: str, why_not: str | None, said: str, kept: int
) -> None:
    monkeypatch.setattr(kept_pages, "_why_no_huge_pages", lambda: why_not)
    monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", said)
    StepPages(device)
    assert asked == ["keep"] * kept


def test_the_first_runs_after_a_change_give_back(asked: list[str]) -> None:
    pages = StepPages("cpu:0")
    pages.end_of_run()
    assert asked == ["keep"]
    for _ in range(2):
        asked.clear()
        pages.variables_changed()
        for _ in range(5):
            pages.end_of_run()
        assert asked == ["give back"] * 3


@pytest.mark.parametrize(
    ("said", "variable", "why"),
    [
        ("always madvise [never]\n", "1", "enabled says never"),
        (None, "1", "only Linux has them"),
        ("always [madvise] never\n", "0", "THP_MEM_ALLOC_ENABLE=0"),
    ],
)
def test_what_is_missing_for_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, variable: str, why: str
) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", variable)
    setting = tmp_path / "enabled"
    if said is not None:
        setting.write_text(said)
    assert why in str(kept_pages._why_no_huge_pages(setting))
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == variable
