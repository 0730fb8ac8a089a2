"""Evaluation beside the training: a process that only watches its checkpoints.

From the public class downwards::

    sidecar.py    `SidecarEvaluator`: which checkpoint is next, metrics over held-out rows, and when it is over
    journal.py    metrics.jsonl, which is also the memory over restarts, and TensorBoard
"""

from torchstrat.checkpoint.evaluation.journal import Evaluation
from torchstrat.checkpoint.evaluation.sidecar import SidecarEvaluator

__all__ = ["Evaluation", "SidecarEvaluator"]
