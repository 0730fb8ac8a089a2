"""Descriptions of clusters."""

import socket

import torchstrat as ts
from tests.mistakes.table import Area, Place
from torchstrat.cluster_resolver import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from torchstrat.errors import ClusterConfigError, WrongTypeError

area = Area("Clusters")


def resolver(cluster: dict[str, list[str]], **task: object) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **task)  # type: ignore[arg-type]


def tf_config(place: Place, job: str, index: int) -> None:
    place.set("TF_CONFIG", {"cluster": {"worker": ["a:1"]}, "task": {"type": job, "index": index}})
    TFConfigClusterResolver()


@area.raises(
    "TF_CONFIG that is no JSON",
    ClusterConfigError,
    given=r"TF_CONFIG='\{cluster'",
    needed="JSON",
    change="write an object",
)
def _(place: Place) -> None:
    place.set("TF_CONFIG", "{cluster")
    TFConfigClusterResolver()


@area.raises(
    "a wrong index in TF_CONFIG", ClusterConfigError, given="task.index=3", needed="one of the tasks", change=r"\[0\]"
)
def _(place: Place) -> None:
    tf_config(place, "worker", 3)


@area.raises(
    "a wrong role in TF_CONFIG",
    ClusterConfigError,
    given="'wroker'",
    needed="the cluster's jobs",
    change=r"\['worker'\]",
)
def _(place: Place) -> None:
    tf_config(place, "wroker", 0)


@area.raises("an address without a port", ClusterConfigError, given="address 'a'", needed="host:port", change="such as")
def _(place: Place) -> None:
    ts.ParameterServerStrategy(resolver({"worker": ["a"], "ps": ["b:1"]}))


@area.raises(
    "half of torchrun's environment",
    ClusterConfigError,
    given="WORLD_SIZE='2'",
    needed="RANK is not set",
    change="torchrun",
)
def _(place: Place) -> None:
    place.set("WORLD_SIZE", "2")
    ts.MirroredStrategy()


@area.raises(
    "a dict for a ClusterSpec", WrongTypeError, given="got dict", needed="a ClusterSpec", change=r"Write ClusterSpec"
)
def _(place: Place) -> None:
    SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]


@area.raises(
    "one address for a list", WrongTypeError, given="str 'a:1'", needed="a list of addresses", change="or a dict"
)
def _(place: Place) -> None:
    ClusterSpec({"worker": "a:1"})


@area.raises(
    "a chief that is not in the cluster",
    ClusterConfigError,
    given="'chief'",
    needed="the cluster's jobs",
    change="Add the job",
)
def _(place: Place) -> None:
    ts.ParameterServerStrategy(resolver({"worker": ["a:1"], "ps": ["b:1"]}, task_type="chief", task_id=0))


@area.raises(
    "a parameter-server script by itself",
    ClusterConfigError,
    given="is empty",
    needed="ClusterSpec",
    change="torchstrat launch --ps 2",
)
def _(place: Place) -> None:
    ts.ParameterServerStrategy(TFConfigClusterResolver())


@area.raises(
    "a ClusterSpec for a resolver",
    WrongTypeError,
    given="got ClusterSpec",
    needed="a cluster resolver",
    change="TFConfig",
)
def _(place: Place) -> None:
    ts.ParameterServerStrategy(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}))  # type: ignore[arg-type]


@area.raises(
    "no parameter server", ClusterConfigError, given="no task of type 'ps'", needed="hold the variables", change="Add"
)
def _(place: Place) -> None:
    ts.ParameterServerStrategy(resolver({"worker": ["a:1"]}))


@area.raises(
    "no secret", ClusterConfigError, given="neither TORCHSTRAT_SECRET", needed="32 characters", change="openssl rand"
)
def _(place: Place) -> None:
    ts.ClusterCoordinator(ts.ParameterServerStrategy(resolver({"worker": ["localhost:1"], "ps": ["localhost:2"]})))


@area.raises(
    "a port in use", ClusterConfigError, given="worker 0 cannot listen", needed="another process", change="another port"
)
def _(place: Place) -> None:
    taken = place.enter(socket.socket())
    taken.bind(("localhost", 0))
    taken.listen()
    place.set("TORCHSTRAT_SECRET", "x" * 40)
    cluster = ClusterSpec({"worker": [f"localhost:{taken.getsockname()[1]}"], "ps": ["localhost:1"]})
    ts.Server(cluster, job_name="worker", task_index=0)


@area.raises(
    "a server of no role", ClusterConfigError, given="wroker 0", needed="'ps' and 'worker'", change="is no role"
)
def _(place: Place) -> None:
    ts.Server(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}), job_name="wroker", task_index=0)
