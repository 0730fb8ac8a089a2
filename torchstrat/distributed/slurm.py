"""What Slurm tells a process about its step, read from its environment. ``scontrol`` is not called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchstrat.core.errors import ClusterConfigError
from torchstrat.distributed.cluster import Environment
from torchstrat.distributed.cluster_environments import Members, Variables


@dataclass(frozen=True)
class SlurmStep:
    """The tasks of a Slurm step. ``hosts[i]`` runs ``tasks[i]`` of them; ``places[rank]`` is (index of its host, number
    among the tasks of that host). ``gpus_on_node`` is None where Slurm does not say."""

    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    rank: int
    gpus_on_node: int | None

    def members(self, port_base: int) -> Members:
        """Task ``k`` of a host listens on ``port_base + k``."""
        addresses = (f"{self.hosts[host]}:{port_base + local}" for host, local in self.places)
        return Members(tuple(addresses), self.rank)


def read_slurm(environ: Environment, tasks_per_node: int | Mapping[str, int] | None = None) -> SlurmStep:
    """What ``srun`` set. Ranks are placed as ``--distribution`` says: block by block, or in turn over the hosts.

    Args:
        tasks_per_node: In place of ``SLURM_STEP_TASKS_PER_NODE``: the same number for every host, or host → number.

    Raises:
        ClusterConfigError: variables are missing, malformed or contradict each other; the message lists all of them.
    """
    variables = Variables(environ)
    hosts = _slurm_hosts(variables)
    tasks = _slurm_tasks(variables, hosts, tasks_per_node)
    rank = variables.number("SLURM_PROCID", least=0, below=sum(tasks) or None)
    cyclic = re.split(r"[:,]", environ.get("SLURM_DISTRIBUTION", ""))[0] == "cyclic"
    places = tuple(_in_turn(tasks) if cyclic else _in_blocks(tasks))
    said = environ.get("SLURM_NODEID"), environ.get("SLURM_LOCALID")
    if not variables.problems and None not in said and tuple(map(str, places[rank])) != said:
        variables.problems.append(
            f"SLURM_NODEID={said[0]!r} and SLURM_LOCALID={said[1]!r} put rank {rank} elsewhere than on node "
            f"{places[rank][0]} as its task {places[rank][1]} (start the step with --distribution=block)"
        )
    gpus = variables.number("SLURM_GPUS_ON_NODE", least=0) if environ.get("SLURM_GPUS_ON_NODE") else None
    variables.check("a Slurm step was to be described", "Start the process with srun, which sets these variables.")
    return SlurmStep(tuple(hosts), tuple(tasks), places, rank, gpus)


def _slurm_hosts(variables: Variables) -> list[str]:
    name, text = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        return expand_node_list(text) if text else []
    except ClusterConfigError as error:
        variables.problems.append(f"{name}={text!r} is no list of nodes ({str(error).rstrip('.')})")
        return []


def _slurm_tasks(
    variables: Variables, hosts: Sequence[str], tasks_per_node: int | Mapping[str, int] | None
) -> list[int]:
    """The number of tasks of each host, checked against the number of hosts and of tasks."""
    if isinstance(tasks_per_node, Mapping):
        missing = [host for host in hosts if host not in tasks_per_node]
        if missing:
            variables.problems.append(f"tasks_per_node={dict(tasks_per_node)} does not name the hosts {missing}")
        return [tasks_per_node.get(host, 0) for host in hosts]
    if tasks_per_node is not None:
        return [tasks_per_node] * len(hosts)
    name, text = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not text:
        return []
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in parts:
        variables.problems.append(f"{name}={text!r} must be a list such as '2(x3),1'")
        return []
    tasks = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if hosts and len(tasks) != len(hosts):
        variables.problems.append(f"{name}={text!r} is about {len(tasks)} nodes, and there are {len(hosts)}: {hosts}")
    total = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    if sum(tasks) != total and not variables.problems:
        variables.problems.append(f"{name}={text!r} adds up to {sum(tasks)} tasks, and the step has {total}")
    return tasks


def _in_blocks(tasks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((host, local) for host, count in enumerate(tasks) for local in range(count))


def _in_turn(tasks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return (
        (host, local) for local in range(max(tasks, default=0)) for host in range(len(tasks)) if local < tasks[host]
    )


_NODE_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


def expand_node_list(text: str) -> list[str]:
    """``"n[001-003,007],m5"`` → ``["n001", "n002", "n003", "n007", "m5"]``. Brackets may stand anywhere, repeatedly.

    Raises:
        ClusterConfigError: unbalanced or empty brackets, an empty name, a range that runs backwards.
    """
    hosts: list[str] = []
    position = 0
    while True:
        alternatives: list[list[str]] = []
        while position < len(text) and text[position] != ",":
            part = _NODE_PART.match(text, position)
            if part is None:
                raise ClusterConfigError(f"a bracket is not closed or not opened at {text[position:]!r}.")
            alternatives.append([part[2]] if part[1] is None else _bracket(part[1]))
            position = part.end()
        if not alternatives:
            raise ClusterConfigError("a name between commas is empty.")
        hosts += ("".join(parts) for parts in itertools.product(*alternatives))
        if position == len(text):
            return hosts
        position += 1


def _bracket(content: str) -> list[str]:
    """``"001-003,007"`` → the numbers, as wide as the first of their range is written."""
    numbers: list[str] = []
    for part in content.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ClusterConfigError(f"[{content}] must hold numbers and ascending ranges, such as [1-3,7].")
        numbers += (
            str(number).zfill(len(bounds[1])) for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
        )
    return numbers
