"""``python -m torchstrat.server``: this process as a worker or a parameter server, without a program of one's own.

::

    python -m torchstrat.server --cluster '{"ps": ["h0:2222"], "worker": ["h1:2222", "h2:2222"]}' --job worker --index 0
    TF_CONFIG=… python -m torchstrat.server
    srun … python -m torchstrat.server --resolver slurm --jobs '{"chief": 1, "ps": 2, "worker": 4}'

The cluster's secret comes from ``TORCHSTRAT_SECRET`` or ``TORCHSTRAT_SECRET_FILE``. Exit codes: 0 when it was told to
end (SIGTERM: what it was doing is finished or handed back first), 2 for a description it cannot use, 69 when its
coordinator was lost and none came in time, 75 when it should be started again, 77 when its coordinator refuses it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torchstrat.core.errors import ClusterConfigError, TorchstratError
from torchstrat.core.terminal import parser_with_examples
from torchstrat.distributed import cluster_resolver
from torchstrat.distributed.cluster import PARAMETER_SERVER
from torchstrat.distributed.cluster_resolver import ClusterSpec
from torchstrat.parameter_server.membership.task_host import DEFAULT_DRAIN_TIMEOUT_SECONDS
from torchstrat.parameter_server.membership.task_server import Server, end_even_if_stuck

__all__ = ["Server", "main"]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

RESOLVERS = {
    "tfconfig": "TFConfigClusterResolver",
    "torchrun": "TorchrunClusterResolver",
    "slurm": "SlurmClusterResolver",
    "kubernetes": "KubernetesClusterResolver",
}

RESOLVER_ARGUMENTS: dict[str, dict[str, str]] = {
    "slurm": {"jobs": "jobs", "port": "port_base"},
    "kubernetes": {"jobs": "jobs", "port": "port", "subdomain": "subdomain"},
}
"""Options of the command that a resolver takes, and what it calls them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        spec, job, index = _described(options)
        server = Server(
            spec,
            job,
            index,
            listen=options.listen,
            orphan_timeout_seconds=options.orphan_timeout,
            drain_timeout_seconds=options.drain_timeout,
            exit_when_finished=options.exit_when_finished,
            keep_pages=options.keep_pages,
            start=False,
        )
        return server.run()
    except TorchstratError as error:
        sys.stderr.write(f"torchstrat: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        server.stop()
        end_even_if_stuck(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = parser_with_examples(
        "python -m torchstrat.server",
        "Be a worker or a parameter server of a torchstrat cluster. Without --cluster and --resolver, TF_CONFIG "
        "describes the cluster and this task.",
        (
            "TF_CONFIG=… python -m torchstrat.server",
            "python -m torchstrat.server --cluster @cluster.json --job worker --index 0",
            """srun … python -m torchstrat.server --resolver slurm --jobs '{"chief": 1, "ps": 2, "worker": 4}'""",
        ),
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cluster", metavar="JSON|@FILE", help='such as {"ps": ["host:port"], "worker": ["host:port"]}')
    where.add_argument("--resolver", choices=RESOLVERS, help="ask the environment of this launcher")
    parser.add_argument(
        "--jobs",
        metavar="JSON",
        help="""with --resolver slurm or kubernetes: the roles of the tasks in order of their ranks, as the program's
        own resolver is told, such as '{"chief": 1, "ps": 2, "worker": 4}'""",
    )
    parser.add_argument("--port", type=int, metavar="N", help="the resolver's port_base (slurm) or port (kubernetes)")
    parser.add_argument("--subdomain", metavar="NAME", help="the headless service of an indexed Job (kubernetes)")
    parser.add_argument("--job", metavar="ps|worker", help="in place of what the environment says")
    parser.add_argument("--index", type=int, metavar="N", help="in place of what the environment says")
    parser.add_argument("--listen", metavar="HOST:PORT", help="bind this in place of the task's own address")
    parser.add_argument(
        "--orphan-timeout",
        type=float,
        metavar="SECONDS",
        help="how long to keep the state after the coordinator was lost (TORCHSTRAT_ORPHAN_TIMEOUT; 600)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_DRAIN_TIMEOUT_SECONDS,
        help="on SIGTERM, for what is being done to be finished or handed back (%(default)g)",
    )
    parser.add_argument("--exit-when-finished", action="store_true", help="end when the coordinator has finished")
    parser.add_argument(
        "--keep-pages",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep the pages of memory that was freed: steps are faster, the resident size stays at its peak "
        "(TORCHSTRAT_KEEP_PAGES; it does)",
    )
    return parser


def _described(options: argparse.Namespace) -> tuple[ClusterSpec, str, int]:
    """The cluster, and which task of it this process is."""
    name = "tfconfig" if options.resolver is None else options.resolver
    arguments = _resolver_arguments(options, "--cluster" if options.cluster is not None else name)
    if options.cluster is not None:
        spec, job, index = _cluster(options.cluster), options.job, options.index
    else:
        resolver = getattr(cluster_resolver, RESOLVERS[name])(**arguments)
        spec = resolver.cluster_spec()
        job = resolver.task_type if options.job is None else options.job
        index = resolver.task_id if options.index is None else options.index
        if not spec:
            raise ClusterConfigError(
                f"nothing describes a cluster: the {name} environment is empty. Give --cluster, --job and --index, or "
                "set TF_CONFIG."
            )
    if (
        name in RESOLVER_ARGUMENTS
        and options.cluster is None
        and options.jobs is None
        and PARAMETER_SERVER not in spec.jobs
    ):
        raise ClusterConfigError(
            f"{name} says how many tasks there are, not which of them are parameter servers. Give --jobs, as the "
            """program's resolver is told: --jobs '{"chief": 1, "ps": 2, "worker": 4}'."""
        )
    if job is None or index is None:
        raise ClusterConfigError(
            f"which task is this? job {job!r}, index {index!r}; give --job and --index. The cluster has "
            f"{spec.as_dict()}."
        )
    return spec, job, index


def _resolver_arguments(options: argparse.Namespace, name: str) -> dict[str, object]:
    """What the command says of the tasks, in the words of the resolver."""
    known = RESOLVER_ARGUMENTS.get(name, {})
    given = {
        option: value for option in ("jobs", "port", "subdomain") if (value := getattr(options, option)) is not None
    }
    for option in given:
        if option not in known:
            takes = " or ".join(one for one, names in RESOLVER_ARGUMENTS.items() if option in names)
            raise ClusterConfigError(
                f"--{option} says nothing where {name} describes the cluster; it is for --resolver {takes}."
            )
    if "jobs" in given:
        try:
            given["jobs"] = json.loads(given["jobs"])
        except json.JSONDecodeError as error:
            raise ClusterConfigError(f"--jobs {given['jobs']!r} is no JSON: {error}") from None
    return {known[option]: value for option, value in given.items()}


def _cluster(text: str) -> ClusterSpec:
    try:
        content = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
        return ClusterSpec(json.loads(content))
    except (OSError, json.JSONDecodeError) as error:
        raise ClusterConfigError(f"--cluster {text!r} holds no cluster: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
