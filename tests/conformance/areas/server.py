"""`ts.Server`, before it is started, and the local one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference
from torchstrat import Server

TWO_WORKERS = {"worker": ["w0:1", "w1:1"]}
TWO_JOBS = {"worker": ["w0:1"], "ps": ["p0:1"]}


def server_def(case: Case) -> dict[str, Any]:
    """The task that a server takes itself for; nothing is started."""
    servers: dict[str, Callable[[], Server]] = {
        "one job two tasks, no index": lambda: Server(TWO_WORKERS, start=False),
        "two jobs, no job name": lambda: Server(TWO_JOBS, start=False),
        "explicit": lambda: Server(TWO_JOBS, "ps", 0, start=False),
        "job unknown": lambda: Server(TWO_JOBS, "zzz", 0, start=False),
        "index out of range": lambda: Server(TWO_JOBS, "worker", 4, start=False),
        "protocol": lambda: Server(TWO_JOBS, "worker", 0, protocol="grpc+x", start=False),
    }
    server = servers[case.inputs["what"]]()
    return {"job_name": server.job_name, "task_index": server.task_index, "protocol": server.protocol}


def create_local_server(_case: Case) -> dict[str, Any]:
    server = Server.create_local_server(keep_pages=False)  # what it sets would hold for all tests after it
    try:
        prefix, host, port = server.target.partition("://")[1:2], *server.target.rpartition(":")[::2]
        return {
            "target_prefix": f"{server.protocol}{prefix[0]}",
            "has_port": host.startswith("grpc://") and int(port) > 0,
            "job": server.job_name,
        }
    finally:
        server.stop()


OPS: dict[str, Callable[[Case], Any]] = {"create_local_server": create_local_server, "server_def": server_def}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
