"""`ts.cluster_resolver.TPUClusterResolver`, and a TPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference
from torchstrat.cluster_resolver import TPUClusterResolver

HOSTS = ["10.0.0.1:8470", "10.0.0.2:8470"]


def ip_list() -> dict[str, Any]:
    resolver = TPUClusterResolver(",".join(f"grpc://{host}" for host in HOSTS))
    return {
        "cluster": resolver.cluster_spec().as_dict(),
        "master": resolver.master(),
        "master worker 1": resolver.master("worker", 1),
    }


def without_a_tpu() -> Any:
    from torchstrat import tpu

    return tpu.initialize_tpu_system(TPUClusterResolver(tpu="local"))


def resolver(case: Case) -> Any:
    calls: dict[str, Callable[[], Any]] = {
        "ip list": ip_list,
        "job_name": lambda: TPUClusterResolver(f"grpc://{HOSTS[0]}", job_name="tpu_worker").cluster_spec().as_dict(),
        "no name, no env": lambda: TPUClusterResolver(environ={}),
        "initialize_tpu_system without tpu": without_a_tpu,
    }
    return calls[case.inputs["what"]]()


OPS: dict[str, Callable[[Case], Any]] = {"TPUClusterResolver": resolver}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
