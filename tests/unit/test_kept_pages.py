"""Keeping the pages of freed memory: what is asked of malloc, when, and who has the last word."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.ps_server_helpers import make_spec, new_shards
from torchstrat import Server, kept_pages
from torchstrat.errors import ClusterConfigError
from torchstrat.kept_pages import environment_that_keeps_pages, give_back_pages, glibc_version, is_wanted, keep_pages
from torchstrat.launch import LocalCluster, local_cluster
from torchstrat.parameter_server.server.service import VariableServer
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.replicas import step_pages
from torchstrat.replicas.step_pages import StepPages
from torchstrat.server import main

NEW, OLD = (2, 36), (2, 35)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # <malloc.h>
ASKED = {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 2**30, M_TRIM_THRESHOLD: 2**31 - 1}
VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}


COORDINATOR = Peer(Task("chief", 0), "c" * 32, "tcp://127.0.0.1:2", "here", 2)


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
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pages, "_keeping_libc", None)


# ---- this process ----------------------------------------------------------------------------------------------------


def test_malloc_is_asked_for_these_three() -> None:
    libc = FakeLibc()
    keep_pages(libc, NEW, {})
    assert libc.asked == ASKED
    assert list(libc.asked) == [M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD]


def test_where_a_large_threshold_is_refused_nothing_is_mapped_at_all() -> None:
    libc = FakeLibc()
    keep_pages(libc, OLD, {})
    assert libc.asked == {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
    assert environment_that_keeps_pages(OLD)["MALLOC_MMAP_MAX_"] == "0"
    assert "MALLOC_MMAP_THRESHOLD_" not in environment_that_keeps_pages(OLD)


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({"MALLOC_ARENA_MAX": "4"}, M_ARENA_MAX),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, M_TRIM_THRESHOLD),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.mmap_threshold=4096"}, M_MMAP_THRESHOLD),
    ],
)
def test_what_the_user_has_set_is_left_as_it_is(environ: dict[str, str], left: int) -> None:
    libc = FakeLibc()
    keep_pages(libc, NEW, environ)
    assert libc.asked == {parameter: value for parameter, value in ASKED.items() if parameter != left}


def test_a_refusal_is_no_error_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "torchstrat.memory"):
        keep_pages(FakeLibc(answer=0), NEW, {})
    assert "glibc 2.36 refuses MALLOC_ARENA_MAX=1" in caplog.text


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kept_pages, "glibc_version", lambda: None)
    libc = FakeLibc()
    with caplog.at_level(logging.DEBUG, "torchstrat.memory"):
        keep_pages(libc)
    assert libc.asked == {}
    assert environment_that_keeps_pages(None) == {}
    assert "the C library is not glibc" in caplog.text


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


def test_a_parameter_server_gives_back_once_what_large_orders_left() -> None:
    """When the next functions have ended, and not before: until then the orders' messages may be there."""
    libc = FakeLibc()
    keep_pages(libc, NEW, {})
    server, value = VariableServer(), torch.zeros(3)
    handlers = server.handlers()
    trimmed = []
    orders = [("ps.create", new_shards(make_spec(0, value), value)), ("ps.catalog", None)]
    for name, payload in [*orders, ("ps.forget_below", 1), ("ps.forget_below", 2), ("ps.end_checkpoint", "token")]:
        handlers[name].answer(COORDINATOR, payload)
        trimmed.append(libc.trimmed)
    handlers["ps.forget_below"].answer(COORDINATOR, 3)
    assert [*trimmed, libc.trimmed] == [0, 0, 1, 1, 1, 2]
    server.close()


def test_a_parameter_server_without_a_job_gives_everything_back() -> None:
    libc = FakeLibc()
    keep_pages(libc, NEW, {})
    server = VariableServer()
    server.coordinator_left(finished=False)
    assert libc.trimmed == 0, "it keeps its state for a coordinator that takes over"
    server.coordinator_left(finished=True)
    assert libc.trimmed == 1
    server.close()


# ---- whether ---------------------------------------------------------------------------------------------------------


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


def test_another_word_is_an_error() -> None:
    with pytest.raises(ClusterConfigError, match="TORCHSTRAT_KEEP_PAGES='no': set it to 1"):
        is_wanted(None, {"TORCHSTRAT_KEEP_PAGES": "no"})


# ---- tasks that are started ------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The environment of each task that a `LocalCluster` starts, and of what it forks them from, instead of those."""
    environments: dict[str, dict[str, str]] = {}

    class Noted:
        alive = False

        def __init__(self, name: str, starter: Any, *_others: Any) -> None:
            environments[name] = starter._environment

        def request_stop(self) -> None: ...

        def join(self, _seconds: float) -> bool:
            return True

    class Idle:
        def close(self) -> None: ...

    class NotedForkServer(Idle):
        def __init__(self, environment: dict[str, str], _reaper: Any) -> None:
            environments["fork server"] = environment

        def start_no_more(self) -> None: ...

    monkeypatch.setattr(local_cluster, "SupervisedProcess", Noted)
    monkeypatch.setattr(local_cluster, "Reaper", Idle)
    monkeypatch.setattr(local_cluster, "ForkServer", NotedForkServer)
    monkeypatch.setattr(local_cluster, "why_not", lambda: None)
    monkeypatch.setattr(local_cluster, "glibc_version", lambda: NEW)
    for name in (*VARIABLES, "TORCHSTRAT_KEEP_PAGES"):
        monkeypatch.delenv(name, raising=False)
    return environments


def of_malloc(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("MALLOC", "TORCHSTRAT_KEEP"))}


def test_workers_and_servers_start_with_these_variables_and_this_process_goes_without(started: Any) -> None:
    with LocalCluster(workers=1, ps=1):
        assert of_malloc(dict(os.environ)) == {}
    assert {name: of_malloc(environment) for name, environment in started.items()} == {
        "fork server": {**VARIABLES, "TORCHSTRAT_KEEP_PAGES": "1"},
        "ps 0": {**VARIABLES, "TORCHSTRAT_KEEP_PAGES": "1"},
        "worker 0": {**VARIABLES, "TORCHSTRAT_KEEP_PAGES": "1"},
    }


def test_the_users_own_values_win(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    with LocalCluster(workers=1, ps=1, env={"MALLOC_TRIM_THRESHOLD_": "0"}):
        pass
    for environment in started.values():
        assert of_malloc(environment) == {
            "MALLOC_ARENA_MAX": "3",
            "MALLOC_MMAP_THRESHOLD_": "1073741824",
            "MALLOC_TRIM_THRESHOLD_": "0",
            "TORCHSTRAT_KEEP_PAGES": "1",
        }


@pytest.mark.parametrize("how", ["argument", "env", "environment"])
def test_it_can_be_switched_off(how: str, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"TORCHSTRAT_KEEP_PAGES": "0"}
    if how == "environment":
        monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", "0")
    options: dict[str, Any] = {"argument": {"keep_pages": False}, "env": {"env": off}, "environment": {}}[how]
    with LocalCluster(workers=1, ps=1, **options):
        pass
    for environment in started.values():
        assert of_malloc(environment) == off, "which tells the task's own program, too"


def test_the_argument_reaches_tasks_over_the_environment(started: Any) -> None:
    with LocalCluster(workers=1, ps=1, env={"TORCHSTRAT_KEEP_PAGES": "0"}, keep_pages=True):
        pass
    assert of_malloc(started["ps 0"]) == {**VARIABLES, "TORCHSTRAT_KEEP_PAGES": "1"}


def test_nothing_starts_with_another_word(started: Any) -> None:
    with pytest.raises(ClusterConfigError, match="TORCHSTRAT_KEEP_PAGES='off'"):
        LocalCluster(workers=1, ps=1, env={"TORCHSTRAT_KEEP_PAGES": "off"}).start()
    assert started == {}


# ---- servers that are started by hand --------------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(kept_pages, "keep_pages", lambda: calls.append("kept"))
    monkeypatch.delenv("TORCHSTRAT_KEEP_PAGES", raising=False)
    return calls


def server(kept: list[str], **options: Any) -> Server:
    def make_service(_task: Any) -> Any:
        kept.append("service")
        raise ZeroDivisionError

    return Server({"worker": ["127.0.0.1:0"]}, secret="s" * 32, start=False, make_service=make_service, **options)


def test_a_server_keeps_its_pages_before_its_service_has_threads(kept: list[str]) -> None:
    made = server(kept)
    assert kept == [], "a server that is not started changes nothing"
    with pytest.raises(ZeroDivisionError):
        made.start()
    assert kept == ["kept", "service"]


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_server_can_be_told_not_to(how: str, kept: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", "0")
    with pytest.raises(ZeroDivisionError):
        server(kept, **({"keep_pages": False} if how == "argument" else {})).start()
    assert kept == ["service"]


def test_a_server_that_cannot_start_changes_nothing(kept: list[str]) -> None:
    with pytest.raises(ClusterConfigError, match="'boss' is no role"):
        Server({"boss": ["h:1"]}, secret="s" * 32).start()
    assert kept == []


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


# ---- replicas in processes of torchrun's -----------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a `StepPages` does with this process, instead of doing it."""
    calls: list[str] = []
    monkeypatch.setattr(step_pages, "keep_pages", lambda: calls.append("keep"))
    monkeypatch.setattr(step_pages, "give_back_pages", lambda: calls.append("give back"))
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    monkeypatch.delenv("TORCHSTRAT_KEEP_PAGES", raising=False)
    return calls


@pytest.mark.parametrize(
    ("device", "huge", "said", "kept"),
    [
        ("cpu:0", True, "", True),
        ("cpu:0", False, "1", False),
        ("cpu:0", True, "0", False),
        ("cuda:0", True, "1", False),
    ],
)
def test_pages_are_kept_where_they_are_huge(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, device: str, huge: bool, said: str, kept: bool
) -> None:
    monkeypatch.setattr(step_pages, "_why_no_huge_pages", lambda: None if huge else "of a reason")
    monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", said)
    StepPages(device)
    assert asked == ["keep"] * kept


def test_the_first_runs_after_a_change_give_back(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_pages, "_why_no_huge_pages", lambda: None)
    pages = StepPages("cpu:0")
    pages.end_of_run()
    assert asked == ["keep"]
    for _ in range(2):
        asked.clear()
        pages.variables_changed()
        for _ in range(5):
            pages.end_of_run()
        assert asked == ["give back"] * 3


def test_a_wrong_word_is_an_error(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTRAT_KEEP_PAGES", "yes")
    with pytest.raises(ClusterConfigError, match="TORCHSTRAT_KEEP_PAGES='yes'"):
        StepPages("cpu:0")


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
    reason = step_pages._why_no_huge_pages(setting)
    assert reason is not None
    assert why in reason
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == variable
