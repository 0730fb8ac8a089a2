"""Where the hosts of a TPU are; public as `ts.cluster_resolver.TPUClusterResolver`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from torchstrat.core.errors import ClusterConfigError, ContextError, WrongTypeError
from torchstrat.distributed.cluster import Environment
from torchstrat.distributed.cluster_spec import WORKER, ClusterSpec
from torchstrat.distributed.resolver_interface import ClusterResolver, address_of
from torchstrat.distributed.tpu_topology import Topology

LOCAL = "local"
VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME")
SCHEME = "grpc"


class TPUClusterResolver(ClusterResolver):
    """Names the hosts of a TPU, and this process as task 0 of them. It contacts nobody, and looks no names up.

    Args:
        tpu: ``"local"``: the TPU of this machine, or virtual devices; the cluster is then empty. Else the hosts'
            addresses, ``"grpc://host:port"``, several separated by commas or in a list; the ``grpc://`` may be left
            out. None: what ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`` or else ``TPU_NAME`` says. ``""``: the same, and
            ``"local"`` where neither is set.
        job_name: The name of the hosts' job.
        coordinator_name, coordinator_address: A further job of one task; both or neither.
        environ: Read in place of `os.environ`, once.

    Raises:
        WrongTypeError: ``tpu`` is neither a string nor a list of strings.
        ClusterConfigError: nothing says where the TPU is; an address is not ``host:port``; a coordinator has only one
            of name and address, or the name of the hosts' job.
    """

    task_type: str
    task_id: int

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        *,
        job_name: str = WORKER,
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        environ: Environment | None = None,
    ) -> None:
        self._tpu = _named(tpu, os.environ if environ is None else environ)
        self._cluster = ClusterSpec({})
        if self._tpu != LOCAL:
            jobs = {job_name: [_address(host) for host in self._tpu.split(",")]}
            self._cluster = ClusterSpec(jobs | _coordinator(job_name, coordinator_name, coordinator_address))
        self._topology: Topology | None = None
        self.task_type, self.task_id = job_name, 0
        self.rpc_layer = SCHEME
        self.environment = ""

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """``grpc://host:port`` of a task, by default of the first host; "" for the TPU of this machine.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        return address_of(self, task_type, task_id, rpc_layer) if self._tpu != LOCAL else ""

    def get_master(self) -> str:
        """TensorFlow's name for `master` without arguments."""
        return self.master()

    def get_job_name(self) -> str:
        """The name of the hosts' job."""
        return self.task_type

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Remember what initialising the TPU found; `num_accelerators` answers from it.

        Raises:
            InvalidArgumentError: these are not the bytes of a topology.
        """
        self._topology = Topology(serialized=serialized_tpu_topology)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """How many TPU cores each host drives.

        Raises:
            ContextError: the TPU was not initialised with this resolver, so nobody has asked it.
        """
        if self._topology is None:
            raise ContextError(
                f"how many cores the TPU {self._tpu!r} has is known once it is initialised; call "
                "ts.tpu.initialize_tpu_system(resolver) first."
            )
        return {"TPU": self._topology.num_tpus_per_task}


def _named(tpu: str | Sequence[str] | None, environ: Environment) -> str:
    if isinstance(tpu, list | tuple) and all(isinstance(host, str) for host in tpu):
        tpu = ",".join(tpu)
    if tpu is not None and not isinstance(tpu, str):
        raise WrongTypeError(
            f"tpu must be 'local', 'grpc://host:port' or a list of addresses; got {type(tpu).__name__} {tpu!r:.100}."
        )
    found = tpu or next((environ[name] for name in VARIABLES if environ.get(name)), LOCAL if tpu == "" else None)
    if found is None:
        raise ClusterConfigError(
            f"nothing says where the TPU is: tpu was not given, and neither {' nor '.join(VARIABLES)} is set. "
            "Write TPUClusterResolver(tpu='local') for the devices of this machine, or give 'grpc://host:port'."
        )
    return found


def _address(host: str) -> str:
    address = re.fullmatch(rf"(?:{SCHEME}://)?([^/:\s]+|\[[^\]\s]+\]):(\d+)", host.strip())
    if address is None:
        raise ClusterConfigError(
            f"the TPU host {host!r} is not an address 'grpc://host:port'. Names are not looked up; give the addresses "
            "of the hosts, or 'local' on the TPU's own machine."
        )
    return f"{address[1]}:{address[2]}"


def _coordinator(job_name: str, name: str | None, address: str | None) -> dict[str, list[str]]:
    if (name is None) != (address is None) or (name is not None and name == job_name):
        raise ClusterConfigError(
            f"a coordinator needs a name other than {job_name!r} and an address; got coordinator_name={name!r} and "
            f"coordinator_address={address!r}."
        )
    return {} if name is None or address is None else {name: [address]}
