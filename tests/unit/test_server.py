"""`ts.Server`: what it is told, what it refuses, and how a process that runs one ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks

from torchstrat import Server
from torchstrat import server as command
from torchstrat.cluster_spec import ClusterSpec
from torchstrat.errors import ClusterConfigError, ContextError, InvalidArgumentError
from torchstrat.parameter_server.meeting import listener, rebirth, task_server
from torchstrat.parameter_server.meeting.rendezvous import Rendezvous
from torchstrat.parameter_server.meeting.roles import check_role, make_service
from torchstrat.parameter_server.tasks import Peer, Task

SECRET = "s" * 32
ONE_EACH = {"worker": ["127.0.0.1:0"], "ps": ["127.0.0.1:0"]}
SOON = 30.0


class Idle:
    """A service and an endpoint that do nothing."""

    def __init__(self, task: Task, **_options: Any) -> None:
        self.peer = Peer(task, "f" * 32, "tcp://127.0.0.1:1", "here", 1)
        self.drained: list[float] = []

    def handlers(self) -> Mapping[str, Any]:
        return {}

    def status(self) -> Mapping[str, Any]:
        return {}

    def attach(self, endpoint: Any) -> None: ...
    def serve(self, handlers: Any) -> None: ...
    def add_peer(self, peer: Peer) -> None: ...
    def remove_peer(self, peer: Peer) -> None: ...
    def coordinator_arrived(self, coordinator: Peer) -> None: ...
    def coordinator_left(self, *, finished: bool) -> None: ...
    def close(self) -> None: ...

    def drain(self, timeout_seconds: float) -> None:
        self.drained.append(timeout_seconds)


IDLE: dict[str, Any] = {"secret": SECRET, "make_service": Idle, "make_endpoint": Idle, "keep_pages": False}


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.stop()


def test_what_is_clear_may_be_left_out() -> None:
    server = Server({"worker": ["h:1"]}, start=False)
    assert (server.job_name, server.task_index, server.protocol) == ("worker", 0, "grpc")
    assert server.target == "grpc://h:1"
    server = Server(ClusterSpec({"worker": {3: "h:1"}, "ps": ["h:2"]}), "worker", start=False)
    assert (server.job_name, server.task_index) == ("worker", 3)


def test_what_is_not_clear_is_an_error_that_lists_the_choices() -> None:
    with pytest.raises(ClusterConfigError, match=r"give job_name, one of the cluster's jobs: \['ps', 'worker'\]"):
        Server(ONE_EACH, start=False)
    with pytest.raises(ClusterConfigError, match=r"give task_index, one of the tasks of job 'worker': \[0, 1\]"):
        Server({"worker": ["h:1", "h:2"]}, start=False)


def test_the_task_is_not_checked_before_it_starts() -> None:
    for job, index, says in (
        ("boss", 0, "'boss' is no role of a cluster"),
        ("chief", 0, "chief 0: the chief is the coordinator: it runs your program"),
        ("evaluator", 0, "evaluator 0: an evaluator runs a program of yours"),
        ("worker", 4, "worker 4 is not in the cluster"),
    ):
        server = Server(ONE_EACH, job, index, start=False, **IDLE)
        assert (server.job_name, server.task_index) == (job, index)
        with pytest.raises(ClusterConfigError, match=says):
            server.start()


def test_an_unknown_protocol_is_an_error_at_the_start() -> None:
    server = Server(ONE_EACH, "worker", protocol="grpc+x", start=False, **IDLE)
    assert server.protocol == "grpc+x"
    with pytest.raises(InvalidArgumentError, match=r"protocol='grpc\+x' is unknown"):
        server.start()


def test_without_a_secret_nothing_starts(monkeypatch) -> None:
    monkeypatch.delenv("TORCHSTRAT_SECRET", raising=False)
    monkeypatch.delenv("TORCHSTRAT_SECRET_FILE", raising=False)
    with pytest.raises(ClusterConfigError, match="there is no cluster secret"):
        Server(ONE_EACH, "worker", **{**IDLE, "secret": None})


def test_it_must_be_started_before_it_is_joined() -> None:
    server = Server(ONE_EACH, "worker", start=False, **IDLE)
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


def test_another_interface_may_be_bound(servers) -> None:
    server = Server({"worker": ["some.host:2222"], "ps": []}, "worker", listen="127.0.0.1:0", **IDLE)
    servers.append(server)
    assert server.target == "grpc://some.host:2222"


def test_a_local_server_has_a_secret_of_its_own(servers, monkeypatch) -> None:
    monkeypatch.delenv("TORCHSTRAT_SECRET", raising=False)
    monkeypatch.delenv("TORCHSTRAT_SECRET_FILE", raising=False)
    asked: list[Task] = []

    def service(task: Task) -> Any:
        asked.append(task)
        return Idle(task)

    server = Server.create_local_server(make_service=service, make_endpoint=Idle, keep_pages=False)
    servers.append(server)
    assert (server.job_name, server.task_index) == ("localhost", 0)
    assert server.target.startswith("grpc://localhost:")
    assert asked == [Task("worker", 0)], "what it runs"


def test_it_drains_on_sigterm_and_the_handler_is_put_back() -> None:
    services: list[Idle] = []

    def service(task: Task) -> Any:
        services.append(Idle(task))
        return services[0]

    before = signal.getsignal(signal.SIGTERM)
    server = Server(ONE_EACH, "worker", start=False, drain_timeout_seconds=3.0, **{**IDLE, "make_service": service})
    told = threading.Thread(target=tell_to_end_once_handled, args=(before,))
    told.start()
    assert server.run() == 0
    told.join()
    assert services[0].drained == [3.0]
    assert signal.getsignal(signal.SIGTERM) is before


def tell_to_end_once_handled(before: Any) -> None:
    while signal.getsignal(signal.SIGTERM) is before:
        threading.Event().wait(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


def test_join_exits_with_the_code_of_an_orphan() -> None:
    server = Server(ONE_EACH, "ps", orphan_timeout_seconds=0.05, **IDLE)
    joined = threading.Event()
    rendezvous = Rendezvous(
        ClusterSpec({}),
        Peer(Task("chief", 0), "c" * 32, "tcp://127.0.0.1:2", "here", 2),
        SECRET.encode(),
        on_joined=lambda peer, status: joined.set(),
        on_left=lambda peer, reason: None,
    )
    rendezvous.start()
    rendezvous.add_task(Task("ps", 0), server.target.removeprefix("grpc://"))
    assert joined.wait(SOON)
    rendezvous.close(finished=False)
    with pytest.raises(SystemExit) as caught:
        server.join()
    assert caught.value.code == 69


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        (None, {}, 600.0),
        (None, {"TORCHSTRAT_ORPHAN_TIMEOUT": "5"}, 5.0),
        (2.0, {"TORCHSTRAT_ORPHAN_TIMEOUT": "5"}, 2.0),
        (None, {"TORCHSTRAT_ORPHAN_TIMEOUT": "inf"}, None),
        (0.0, {}, 0.0),
    ],
)
def test_the_argument_beats_the_environment_beats_the_default(argument, environ, expected) -> None:
    assert task_server._orphan_timeout(argument, environ) == expected


@pytest.mark.parametrize("value", ["soon", "-1", "nan", ""])
def test_a_time_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"TORCHSTRAT_ORPHAN_TIMEOUT={value!r} must be a number of seconds"):
        task_server._orphan_timeout(None, {"TORCHSTRAT_ORPHAN_TIMEOUT": value})


# The command


@pytest.fixture
def asked(monkeypatch) -> list[tuple[Any, ...]]:
    """What the command asks of `Server`, which is not started."""
    calls: list[tuple[Any, ...]] = []

    class Noted:
        def __init__(self, spec: ClusterSpec, job: str, index: int, **options: Any) -> None:
            calls.append((spec.as_dict(), job, index, options))

        def run(self) -> int:
            return 69

    monkeypatch.setattr(command, "Server", Noted)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return calls


CLUSTER = {"worker": ["h:1", "h:2"], "ps": ["h:3"]}
DEFAULTS = {
    "listen": None,
    "orphan_timeout_seconds": None,
    "drain_timeout_seconds": 30.0,
    "exit_when_finished": False,
    "keep_pages": None,
    "start": False,
}


def test_the_command_takes_a_cluster_and_a_task(asked, tmp_path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(CLUSTER))
    task = ["--job", "worker", "--index", "1"]
    assert command.main(["--cluster", json.dumps(CLUSTER), *task]) == 69
    assert command.main(["--cluster", f"@{file}", *task, "--orphan-timeout", "5", "--listen", "0.0.0.0:1"]) == 69
    assert asked == [
        (CLUSTER, "worker", 1, DEFAULTS),
        (CLUSTER, "worker", 1, {**DEFAULTS, "orphan_timeout_seconds": 5.0, "listen": "0.0.0.0:1"}),
    ]


def test_the_command_takes_what_the_environment_says_and_the_arguments_before_it(asked, monkeypatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}))
    command.main([])
    command.main(["--resolver", "tfconfig", "--index", "1", "--exit-when-finished"])
    assert asked == [
        (CLUSTER, "worker", 0, DEFAULTS),
        (CLUSTER, "worker", 1, {**DEFAULTS, "exit_when_finished": True}),
    ]


SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
}
ROLES = {"chief": 1, "ps": 1, "worker": 2}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


def test_the_command_takes_the_roles_of_a_slurm_step(asked, slurm) -> None:
    assert command.main(["--resolver", "slurm", "--jobs", json.dumps(ROLES), "--port", "7000"]) == 69
    cluster = {"chief": ["node1:7000"], "ps": ["node1:7001"], "worker": ["node2:7000", "node2:7001"]}
    assert asked == [(cluster, "worker", 1, DEFAULTS)]


def test_the_command_takes_the_roles_of_an_indexed_job(asked, monkeypatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("HOSTNAME", "train-1")
    command.main(
        ["--resolver", "kubernetes", "--jobs", '{"ps": 1, "worker": 1}', "--subdomain", "pods", "--port", "7000"]
    )
    assert asked == [({"ps": ["train-0.pods:7000"], "worker": ["train-1.pods:7000"]}, "worker", 0, DEFAULTS)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resolver", "slurm"], r"not which of them are parameter servers. Give --jobs"),
        (["--resolver", "slurm", "--jobs", "{ps"], "is no JSON"),
        (["--resolver", "slurm", "--jobs", '{"ps": 1}'], "takes 1 processes, and the job has 4"),
        (["--resolver", "slurm", "--subdomain", "pods"], "it is for --resolver kubernetes"),
        (["--resolver", "tfconfig", "--jobs", "{}"], "--jobs says nothing where tfconfig describes the cluster"),
        (["--cluster", "{}", "--port", "1"], "--port says nothing where --cluster describes the cluster"),
    ],
)
def test_roles_that_say_nothing_are_an_error(asked, slurm, capsys, arguments: list[str], message: str) -> None:
    assert command.main(arguments) == command.EXIT_USAGE
    assert re.search(message, capsys.readouterr().err)
    assert asked == []


@pytest.mark.parametrize("name", command.RESOLVERS.values())
def test_every_resolver_of_the_command_exists(name: str) -> None:
    assert name in command.cluster_resolver.__all__


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing describes a cluster: the tfconfig environment is empty"),
        (["--cluster", "{"], "--cluster '{' holds no cluster"),
        (["--cluster", "@/no/such/file"], "holds no cluster: .*No such file"),
        (["--cluster", "[1]"], "a cluster is described by a dict"),
        (["--cluster", json.dumps(CLUSTER), "--job", "ps"], "which task is this. job 'ps', index None"),
    ],
)
def test_the_command_says_what_is_missing(arguments, says, asked, capsys) -> None:
    assert command.main(arguments) == 2
    assert asked == []
    stderr = capsys.readouterr().err
    assert stderr.startswith("torchstrat: ")
    assert re.search(says, stderr), stderr


# Roles


def test_each_role_has_a_service() -> None:
    for task in (Task("ps", 0), Task("worker", 2)):
        check_role(task)
        service = make_service(task)
        assert service.handlers()
        service.close()


# Coming back


def test_a_process_starts_its_own_command_line_again(monkeypatch) -> None:
    executed: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: executed.append(arguments))
    monkeypatch.setattr("sys.orig_argv", ["python", "-X", "dev", "-m", "torchstrat.server", "--job", "ps"])
    monkeypatch.setattr("sys.executable", "/some/python")
    rebirth.start_again()
    assert executed == [("/some/python", ["/some/python", "-X", "dev", "-m", "torchstrat.server", "--job", "ps"])]


def test_a_child_of_multiprocessing_leaves_that_to_its_parent(monkeypatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    monkeypatch.setattr(os, "execv", lambda *arguments: pytest.fail("it was executed"))
    rebirth.start_again()


def test_a_worker_whose_port_is_in_use_leaves_no_hook_before_steps(monkeypatch) -> None:
    monkeypatch.setattr(listener, "BIND_SECONDS", 0.05)
    hooks = list(optimizer_pre_hooks)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        spec = {"worker": [f"127.0.0.1:{taken.getsockname()[1]}"], "ps": ["127.0.0.1:1"]}
        with pytest.raises(ClusterConfigError, match="cannot listen"):
            Server(spec, "worker", 0, secret=SECRET)
    assert list(optimizer_pre_hooks) == hooks
