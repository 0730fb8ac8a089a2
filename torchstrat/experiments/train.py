"""One run, under whichever strategy: what ``scripts/train.py`` calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from torchstrat.experiments import asynchronous, evaluate, launch, loop
from torchstrat.experiments.launch import Run


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
    if evaluate.is_evaluator():
        evaluate.evaluate(run)
    elif config.name_of("strategy") == "parameter_server":
        asynchronous.train(run)
    else:
        loop.train(run)
