"""Descriptions of clusters."""

import socket

import torchstrat as ts
from tests.mistakes.table import Area, raises
from torchstrat.cluster_resolver import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from torchstrat.errors import ClusterConfigError, WrongTypeError


def resolver(cluster: dict[str, list[str]], **task: object) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **task)  # type: ignore[arg-type]


def tf_config(place: Area, job: str, index: int) -> None:
    place.set("TF_CONFIG", {"cluster": {"worker": ["a:1"]}, "task": {"type": job, "index": index}})
    TFConfigClusterResolver()


class Clusters(Area):
    title = "Clusters"

    @raises(ClusterConfigError, r"TF_CONFIG='\{cluster'", "JSON", "write an object")
    def tf_config_that_is_no_json(self) -> None:
        self.set("TF_CONFIG", "{cluster")
        TFConfigClusterResolver()

    @raises(ClusterConfigError, "task.index=3", "one of the tasks", r"\[0\]")
    def a_wrong_index_in_tf_config(self) -> None:
        tf_config(self, "worker", 3)

    @raises(ClusterConfigError, "'wroker'", "the cluster's jobs", r"\['worker'\]")
    def a_wrong_role_in_tf_config(self) -> None:
        tf_config(self, "wroker", 0)

    @raises(ClusterConfigError, "address 'a'", "host:port", "such as")
    def an_address_without_a_port(self) -> None:
        ts.ParameterServerStrategy(resolver({"worker": ["a"], "ps": ["b:1"]}))

    @raises(ClusterConfigError, "WORLD_SIZE='2'", "RANK is not set", "torchrun")
    def half_of_the_environment_of_torchrun(self) -> None:
        self.set("WORLD_SIZE", "2")
        ts.MirroredStrategy()

    @raises(WrongTypeError, "got dict", "a ClusterSpec", r"Write ClusterSpec")
    def a_dict_for_a_cluster_spec(self) -> None:
        SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]

    @raises(WrongTypeError, "str 'a:1'", "a list of addresses", "or a dict")
    def one_address_for_a_list(self) -> None:
        ClusterSpec({"worker": "a:1"})

    @raises(ClusterConfigError, "'chief'", "the cluster's jobs", "Add the job")
    def a_chief_that_is_not_in_the_cluster(self) -> None:
        ts.ParameterServerStrategy(resolver({"worker": ["a:1"], "ps": ["b:1"]}, task_type="chief", task_id=0))

    @raises(ClusterConfigError, "is empty", "ClusterSpec", "torchstrat launch --ps 2")
    def a_parameter_server_script_by_itself(self) -> None:
        ts.ParameterServerStrategy(TFConfigClusterResolver())

    @raises(WrongTypeError, "got ClusterSpec", "a cluster resolver", "TFConfig")
    def a_cluster_spec_for_a_resolver(self) -> None:
        ts.ParameterServerStrategy(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}))  # type: ignore[arg-type]

    @raises(ClusterConfigError, "no task of type 'ps'", "hold the variables", "Add")
    def no_parameter_server(self) -> None:
        ts.ParameterServerStrategy(resolver({"worker": ["a:1"]}))

    @raises(ClusterConfigError, "neither TORCHSTRAT_SECRET", "32 characters", "openssl rand")
    def no_secret(self) -> None:
        ts.ClusterCoordinator(ts.ParameterServerStrategy(resolver({"worker": ["localhost:1"], "ps": ["localhost:2"]})))

    @raises(ClusterConfigError, "worker 0 cannot listen", "another process", "another port")
    def a_port_in_use(self) -> None:
        taken = self.enter_context(socket.socket())
        taken.bind(("localhost", 0))
        taken.listen()
        self.set("TORCHSTRAT_SECRET", "x" * 40)
        cluster = ClusterSpec({"worker": [f"localhost:{taken.getsockname()[1]}"], "ps": ["localhost:1"]})
        ts.Server(cluster, job_name="worker", task_index=0)

    @raises(ClusterConfigError, "wroker 0", "'ps' and 'worker'", "is no role")
    def a_server_of_no_role(self) -> None:
        ts.Server(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}), job_name="wroker", task_index=0)
