"""What a worker tells the servers of a buffer that a function has changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.remote_access import VariableEdit
from torchstrat.reduction import VariableAggregation


class BufferEdits:
    """The rule by which changes of several workers come together. ``aggregations``: by variable, what the program has
    set (`StrategyExtended.set_aggregation`). ``is_shared``: whether there are other workers.

    Integral buffers, and those that are set to be sums, go as differences, so that every worker's changes count.
    Others go as they are. Where another worker has changed one meanwhile, the difference is added to running statistics
    of `torch.nn`; of any other the last value stays, and servers note a conflict, unless the program has set that.
    """

    def __init__(self) -> None:
        self.aggregations: Mapping[int, VariableAggregation] = {}
        self.is_shared = False

    def edit_of(
        self, spec: VariableSpec, current: torch.Tensor, reference: torch.Tensor, *, is_statistic: bool
    ) -> VariableEdit:
        """``reference``: its value when it was read."""
        aggregation = self.aggregations.get(spec.number)
        is_inexact = current.is_floating_point() or current.is_complex()
        if current.dtype != torch.bool and (aggregation is VariableAggregation.SUM or not is_inexact):
            return VariableEdit(spec, "add", current - reference)
        if not self.is_shared or aggregation is not None:
            return VariableEdit(spec, "assign", current)
        return VariableEdit(spec, "move" if is_statistic and is_inexact else "assign", current, None, reference)
