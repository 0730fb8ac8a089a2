"""Evaluation beside the training: a process that only watches its checkpoints.

From the public class downwards::

    sidecar.py    `SidecarEvaluator`: which checkpoint is next, and when it is over
    scoring.py    metrics over held-out rows, under any strategy
    watched.py    what is in the directory, while others write to it and delete from it
    journal.py    metrics.jsonl, which is also the memory over restarts, and TensorBoard
    request.py    a request to finish, also from a signal handler
"""

from torchstrat.checkpoint.evaluation.journal import Evaluation
from torchstrat.checkpoint.evaluation.sidecar import SidecarEvaluator

__all__ = ["Evaluation", "SidecarEvaluator"]
