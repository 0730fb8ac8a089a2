"""Whether this process is a job of its own, which is all that this strategy can be."""

from __future__ import annotations

import os

from torchstrat.cluster import Environment, process_plan_from_torchrun, read_tf_config
from torchstrat.cluster_spec import CHIEF, EVALUATOR, WORKER
from torchstrat.errors import InvalidArgumentError

INDEPENDENT = "TORCHSTRAT_INDEPENDENT"


def require_own_job(strategy: str, independent: bool, environ: Environment | None = None) -> None:
    """For a strategy of one process.

    Raises:
        InvalidArgumentError: a launcher has started this process as one of several tasks, each of which would train by
            itself on all of the data, and nobody says that they are to.
    """
    environ = os.environ if environ is None else environ
    if independent or environ.get(INDEPENDENT, "") not in ("", "0"):
        return
    tasks, said_by = _tasks(environ)
    if tasks > 1:
        raise InvalidArgumentError(
            f"{strategy} is a strategy of one process, and {said_by} says that this process is one of {tasks} tasks; "
            "each would train by itself, on all of the data. A strategy that spans processes joins them: "
            "ts.MultiWorkerMirroredStrategy(). If they are to be independent of each other, say so: "
            f"{strategy}(independent=True), or {INDEPENDENT}=1 in the environment."
        )


def _tasks(environ: Environment) -> tuple[int, str]:
    """How many tasks the job has, and who says so."""
    plan = process_plan_from_torchrun(environ)
    if plan is not None:
        return plan.size, "torchrun's environment (WORLD_SIZE)"
    config = read_tf_config(environ)
    if config.cluster and config.task_type != EVALUATOR:
        return sum(config.cluster.num_tasks(job) for job in (CHIEF, WORKER) if job in config.cluster.jobs), "TF_CONFIG"
    text = environ.get("SLURM_STEP_NUM_TASKS", "")
    return (int(text) if text.isdigit() else 1), "Slurm (SLURM_STEP_NUM_TASKS)"
