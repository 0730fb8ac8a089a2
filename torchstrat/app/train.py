"""One run, under whichever strategy and in whichever role: what ``scripts/train.py`` calls.

The evaluator's role is that of a process that ``TF_CONFIG`` makes one: the same command then evaluates a run's
checkpoints. ``torchstrat launch --evaluator …`` starts it. So does anybody with ``TF_CONFIG='{"task": {"type":
"evaluator"}}'``, beside any run that keeps checkpoints, on this machine or on another that sees their directory.
Results are in the folder ``evaluation`` there, as `torchstrat.SidecarEvaluator` writes them; the scores are those of
the training's own evaluation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchstrat.app import asynchronous, build, data, launch, loop
from torchstrat.app.checkpoints import directory_of
from torchstrat.app.config import require
from torchstrat.app.launch import Run
from torchstrat.app.loop import loss_of, planned_steps, score
from torchstrat.checkpoint.evaluation import SidecarEvaluator
from torchstrat.checkpoint.journal import Evaluation
from torchstrat.distributed.cluster import EVALUATOR
from torchstrat.distributed.cluster_resolver import TFConfigClusterResolver


def main(words: Sequence[str] | None = None) -> int:
    """``torchstrat train`` and ``scripts/train.py``: every run that the words ask for; returns the exit status."""
    if words is not None:
        sys.argv = ["torchstrat train", *words]  # Hydra reads them there
    status = launch.main(train)
    if words is not None and not {"--help", "-h"}.isdisjoint(words):
        raise SystemExit(status)  # as the other commands end, which have argparse's help
    return status


def train(run: Run) -> None:
    """Do one run, on every process of it, in the role that its environment says.

    Leaves no process group, cluster, thread or file open.

    Raises:
        TorchstratError: the data cannot be read, the configuration does not fit it or the processes, or one is lost.
    """
    config = run.config
    if config.cluster.threads_per_process is not None:
        torch.set_num_threads(config.cluster.threads_per_process)
    if is_evaluator():
        evaluate(run)
    elif config.name_of("strategy") == "parameter_server":
        asynchronous.train(run)
    else:
        loop.train(run)


def is_evaluator() -> bool:
    """Whether the environment makes this process one. Raises `ClusterConfigError` for a malformed ``TF_CONFIG``."""
    return TFConfigClusterResolver().task_type == EVALUATOR


def evaluate(run: Run) -> None:
    """Evaluate the run's checkpoints until its training has ended, in this process and on the CPU.

    Raises:
        InvalidArgumentError: the run keeps no checkpoints; they do not fit its settings; the data cannot be read; a
            launcher started several processes.
        CommunicationTimeoutError: no checkpoint came in time.
    """
    config = run.config
    who, evaluators = "TF_CONFIG makes this process the evaluator, and", run.plan.size if run.plan else 1
    require(evaluators == 1, f"{who} torchrun started {evaluators} of them; start one.")
    require(config.keeps_checkpoints, f"{who} this run keeps no checkpoints to evaluate; set checkpoint.every_steps.")
    examples = data.load(config.data)
    loss = loss_of(config, examples)

    def scores(model: nn.Module, batches: Any) -> dict[str, float]:
        found = score(model, batches, loss)
        return {name: found[name] for name in ("loss", "accuracy") if found[name] is not None}

    SidecarEvaluator(
        lambda: build.model(config, examples),
        examples.test_loader(config.global_batch),
        directory_of(config),
        evaluate_fn=scores,
        log_dir=directory_of(config) / "evaluation",  # they are results of those checkpoints and of no others
        newest_only=config.evaluator.newest_only,
        timeout=config.evaluator.timeout_seconds,
        until_step=planned_steps(config, examples),
        on_evaluation=None if config.progress == "off" else _say,
        tensorboard=config.tensorboard,
    ).start()


def _say(evaluation: Evaluation, _model: nn.Module) -> None:
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items())
    print(f"evaluation of step {evaluation.step}: {numbers}", file=sys.stderr, flush=True)
