"""`ts.Server`: what it is told, what it refuses, and how a process that runs one ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks

from tests.support.ps_meeting import SERVER, SOON, WORKER, Cast, StandIn
from torchstrat import Server, cluster_resolver
from torchstrat import server as command
from torchstrat.cluster_resolver import ClusterSpec
from torchstrat.errors import ClusterConfigError, ContextError, InvalidArgumentError
from torchstrat.parameter_server.membership import handshake, task_host

SECRET = "s" * 32
ONE_EACH = {"worker": ["127.0.0.1:0"], "ps": ["127.0.0.1:0"]}
IDLE: dict[str, Any] = {"secret": SECRET, "make_service": StandIn, "make_endpoint": StandIn, "keep_pages": False}


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHSTRAT_SECRET", "TORCHSTRAT_SECRET_FILE", "TORCHSTRAT_ORPHAN_TIMEOUT", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.stop()


def test_what_is_clear_may_be_left_out_and_the_rest_is_an_error_that_lists_the_choices() -> None:
    server = Server({"worker": ["h:1"]}, start=False)
    assert (server.job_name, server.task_index, server.protocol) == ("worker", 0, "grpc")
    assert server.target == "grpc://h:1"
    server = Server(ClusterSpec({"worker": {3: "h:1"}, "ps": ["h:2"]}), "worker", start=False)
    assert (server.job_name, server.task_index) == ("worker", 3)
    with pytest.raises(ClusterConfigError, match=r"give job_name, one of the cluster's jobs: \['ps', 'worker'\]"):
        Server(ONE_EACH, start=False)
    with pytest.raises(ClusterConfigError, match=r"give task_index, one of the tasks of job 'worker': \[0, 1\]"):
        Server({"worker": ["h:1", "h:2"]}, start=False)


@pytest.mark.parametrize(
    ("job", "index", "options", "environ", "error", "says"),
    [
        ("boss", 0, {}, {}, ClusterConfigError, "'boss' is no role of a cluster"),
        ("chief", 0, {}, {}, ClusterConfigError, "chief 0: the chief is the coordinator: it runs your program"),
        ("evaluator", 0, {}, {}, ClusterConfigError, "evaluator 0: an evaluator runs a program of yours"),
        ("worker", 4, {}, {}, ClusterConfigError, "worker 4 is not in the cluster"),
        ("worker", 0, {"protocol": "grpc+x"}, {}, InvalidArgumentError, r"protocol='grpc\+x' is unknown"),
        ("worker", 0, {"secret": None}, {}, ClusterConfigError, "there is no cluster secret"),
        *[
            ("ps", 0, {}, {"TORCHSTRAT_ORPHAN_TIMEOUT": value}, ClusterConfigError, f"={value!r} must be a number of s")
            for value in ("soon", "-1", "nan", "")
        ],
    ],
)
def test_a_task_is_checked_when_it_starts(job, index, options, environ, error, says, monkeypatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    server = Server(ONE_EACH, job, index, start=False, **{**IDLE, **options})
    assert (server.job_name, server.task_index) == (job, index)
    assert server.protocol == options.get("protocol", "grpc")
    with pytest.raises(error, match=says):
        server.start()
    server.stop()
    with pytest.raises(ContextError, match="was not started"):
        server.join()


def test_the_target_is_where_it_listens_and_starting_twice_does_nothing(servers, capsys) -> None:
    server = Server(ONE_EACH, "worker", **IDLE)
    servers.append(server)
    server.start()
    protocol, _, port = server.target.rpartition(":")
    assert protocol == "grpc://127.0.0.1"
    assert int(port) > 0
    assert capsys.readouterr().err == f"torchstrat: worker 0 listens on 127.0.0.1:{port} (pid {os.getpid()})\n"
    servers.append(Server({"worker": ["some.host:2222"], "ps": []}, "worker", listen="127.0.0.1:0", **IDLE))
    assert servers[1].target == "grpc://some.host:2222", "another interface may be bound"


def test_a_local_server_is_a_worker_with_a_secret_of_its_own(servers) -> None:
    asked: list[Any] = []
    options = {**IDLE, "make_service": lambda task: asked.append(task) or StandIn(task)}
    del options["secret"]
    servers.append(Server.create_local_server(**options))
    assert (servers[0].job_name, servers[0].task_index) == ("localhost", 0)
    assert servers[0].target.startswith("grpc://localhost:")
    assert asked == [WORKER]


@pytest.fixture
def on_sigterm() -> Iterator[Any]:
    """A handler of the program's own."""
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    yield handler
    signal.signal(signal.SIGTERM, before)


def test_it_drains_on_sigterm_and_the_handler_is_put_back(on_sigterm: Any) -> None:
    service = StandIn(WORKER)
    options = {**IDLE, "make_service": lambda task: service}
    server = Server(ONE_EACH, "worker", start=False, drain_timeout_seconds=3.0, **options)

    def tell_to_end_once_handled() -> None:
        while signal.getsignal(signal.SIGTERM) is on_sigterm:
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    told = threading.Thread(target=tell_to_end_once_handled)
    told.start()
    assert server.run() == 0
    told.join()
    assert service.log.of("drain") == [("drain", 3.0)]
    assert signal.getsignal(signal.SIGTERM) is on_sigterm


@pytest.mark.parametrize(
    ("argument", "environ", "waits"),
    [
        (None, {}, "600 s"),
        (None, {"TORCHSTRAT_ORPHAN_TIMEOUT": "5"}, "5 s"),
        (2.0, {"TORCHSTRAT_ORPHAN_TIMEOUT": "5"}, "2 s"),
        (None, {"TORCHSTRAT_ORPHAN_TIMEOUT": "inf"}, "without limit"),
        (1e10, {}, "without limit"),
        (0.0, {}, "0 s"),
    ],
)
def test_it_waits_for_another_coordinator_as_argument_environment_and_default_say(
    argument, environ, waits, servers, monkeypatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", lines := io.StringIO())
    servers.append(server := Server(ONE_EACH, "ps", orphan_timeout_seconds=argument, **IDLE))
    with Cast() as cast:
        coordinator = cast.coordinator({}, secret=SECRET.encode())
        coordinator.add_task(SERVER, server.target.removeprefix("grpc://"))
        coordinator.wait_for([SERVER], SOON)
        coordinator.die()
    while "it keeps its state" not in lines.getvalue():
        threading.Event().wait(0.001)
    assert f"it keeps its state and waits {waits}.\n" in lines.getvalue()
    if argument == 0.0:
        with pytest.raises(SystemExit) as caught:
            server.join()
        assert caught.value.code == 69


# The command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asks of `Server`, which is not started."""
    calls: list[tuple[Any, ...]] = []

    class Noted:
        def __init__(self, spec: ClusterSpec, job: str, index: int, **options: Any) -> None:
            calls.append((spec.as_dict(), job, index, options))

        def run(self) -> int:
            return 69

    monkeypatch.setattr(command, "Server", Noted)
    return calls


CLUSTER = {"worker": ["h:1", "h:2"], "ps": ["h:3"]}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
}
ROLES = '{"chief": 1, "ps": 1, "worker": 2}'
TASK = ["--job", "worker", "--index", "1"]
OPTIONS = ["--orphan-timeout", "5", "--listen", "0.0.0.0:1"]
PODS = ["--resolver", "kubernetes", "--jobs", '{"ps": 1, "worker": 1}', "--subdomain", "pods", "--port", "7000"]
DEFAULTS = {
    "listen": None,
    "orphan_timeout_seconds": None,
    "drain_timeout_seconds": 30.0,
    "exit_when_finished": False,
    "keep_pages": None,
    "start": False,
}


ON_SLURM = {"chief": ["node1:7000"], "ps": ["node1:7001"], "worker": ["node2:7000", "node2:7001"]}
IN_PODS = {"ps": ["train-0.pods:7000"], "worker": ["train-1.pods:7000"]}
SAID = {"orphan_timeout_seconds": 5.0, "listen": "0.0.0.0:1"}
AN_INDEX = ["--resolver", "tfconfig", "--index", "1", "--exit-when-finished"]
TAKEN: dict[str, tuple[Any, ...]] = {
    "arguments": ({}, ["--cluster", json.dumps(CLUSTER), *TASK], CLUSTER, 1, {}),
    "a file": ({}, ["--cluster", "@cluster.json", *TASK, *OPTIONS], CLUSTER, 1, SAID),
    "TF_CONFIG": (TF_CONFIG, [], CLUSTER, 0, {}),
    "arguments before TF_CONFIG": (TF_CONFIG, AN_INDEX, CLUSTER, 1, {"exit_when_finished": True}),
    "a Slurm step": (SLURM, ["--resolver", "slurm", "--jobs", ROLES, "--port", "7000"], ON_SLURM, 1, {}),
    "an indexed Job": ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, PODS, IN_PODS, 0, {}),
}


@pytest.mark.parametrize("how", TAKEN)
def test_the_command_takes_a_cluster_and_a_task(asked, monkeypatch, tmp_path, how) -> None:
    environ, arguments, cluster, index, options = TAKEN[how]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 69
    if environ is SLURM:
        chief = cluster_resolver.SlurmClusterResolver(jobs=json.loads(ROLES), port_base=7000)
        assert chief.cluster_spec().as_dict() == cluster, "the program's own resolver says the same"
    assert asked == [(cluster, "worker", index, {**DEFAULTS, **options})]


@pytest.mark.parametrize(
    ("environ", "arguments", "says"),
    [
        ({}, [], "nothing describes a cluster: the tfconfig environment is empty"),
        ({}, ["--cluster", "{"], "--cluster '{' holds no cluster"),
        ({}, ["--cluster", "@/no/such/file"], "holds no cluster: .*No such file"),
        ({}, ["--cluster", "[1]"], "a cluster is described by a dict"),
        ({}, ["--cluster", json.dumps(CLUSTER), "--job", "ps"], "which task is this. job 'ps', index None"),
        (
            {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "chief"}})},
            [],
            "which task is this. job 'chief', index None",
        ),
        (SLURM, ["--resolver", "slurm"], r"not which of them are parameter servers. Give --jobs"),
        (SLURM, ["--resolver", "slurm", "--jobs", "{ps"], "is no JSON"),
        (SLURM, ["--resolver", "slurm", "--jobs", '{"ps": 1}'], "takes 1 processes, and the job has 4"),
        (SLURM, ["--resolver", "slurm", "--subdomain", "pods"], "it is for --resolver kubernetes"),
        (SLURM, ["--resolver", "tfconfig", "--jobs", "{}"], "--jobs says nothing where tfconfig describes the cluster"),
        (SLURM, ["--cluster", "{}", "--port", "1"], "--port says nothing where --cluster describes the cluster"),
    ],
)
def test_the_command_says_in_one_line_what_is_missing(asked, monkeypatch, capsys, environ, arguments, says) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert command.main(arguments) == command.EXIT_USAGE == 2
    assert asked == []
    stderr = capsys.readouterr().err
    assert re.fullmatch(rf"torchstrat: [^\n]*{says}[^\n]*\n", stderr), stderr


def test_the_command_knows_resolvers_and_says_that_there_is_no_secret(capsys) -> None:
    assert set(command.RESOLVERS.values()) <= set(cluster_resolver.__all__)
    assert command.main(["--cluster", json.dumps(ONE_EACH), "--job", "ps", "--index", "0"]) == 2
    assert capsys.readouterr().err.startswith("torchstrat: there is no cluster secret")


# Coming back


@pytest.mark.parametrize("is_child", [False, True], ids=["a program", "a child of multiprocessing"])
def test_a_process_starts_its_own_command_line_again_or_leaves_that_to_its_parent(monkeypatch, is_child: bool) -> None:
    executed: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: executed.append(arguments))
    monkeypatch.setattr("sys.orig_argv", ["python", "-X", "dev", "-m", "torchstrat.server", "--job", "ps"])
    monkeypatch.setattr("sys.executable", "/some/python")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object() if is_child else None)
    task_host.start_again()
    command_line = ["/some/python", "-X", "dev", "-m", "torchstrat.server", "--job", "ps"]
    assert executed == ([] if is_child else [("/some/python", command_line)])


def test_a_worker_whose_port_is_in_use_leaves_no_hook_before_steps(monkeypatch) -> None:
    monkeypatch.setattr(handshake, "BIND_SECONDS", 0.05)
    hooks = list(optimizer_pre_hooks)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = {"worker": [f"127.0.0.1:{taken.getsockname()[1]}"], "ps": ["127.0.0.1:1"]}
        with pytest.raises(ClusterConfigError, match="cannot listen"):
            Server(spec, "worker", 0, secret=SECRET)
    assert list(optimizer_pre_hooks) == hooks
