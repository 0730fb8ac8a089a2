"""Which one value replicas' buffers become when a run has ended: the rule, for replicas of one process and of several.

A buffer's aggregation is what the program has said (`StrategyExtended.set_aggregation`). Without that, in training mode
floating buffers that differ become their mean by rows (`StepWeights.in_buffers`), as running statistics want it, and
all others are the first replica's. That does not fit buffers that count rows, add up, or have a row for each row of the
batch; nothing tells these from running statistics of a module's own, so where such a buffer is met a warning says once
what is made of it.
"""

from __future__ import annotations

import math
import warnings
import weakref
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from torchstrat.core._torch_private import own_buffer, own_buffers, version_of
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import VariableAggregation

_aggregations: weakref.WeakKeyDictionary[nn.Module, dict[str, VariableAggregation]] = weakref.WeakKeyDictionary()
# What programs have set: facts about modules, whichever strategy trains them.

_OWN_STATISTICS = (
    "torch.nn.SyncBatchNorm has normalised each replica's rows by themselves: it knows no strategy's replicas. Make it "
    "with model = ts.convert_sync_batchnorm(model), which takes these layers, too."
)


class BufferRules:
    """The aggregations that a program has set, and the buffers of which one strategy has warned. ``changes``: how often
    one was set."""

    changes: ClassVar[int] = 0

    def __init__(self) -> None:
        self._set = _aggregations
        self._warned: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self._edited: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Whether any has been set."""
        return bool(self._set)

    def set(self, module: nn.Module, name: str, aggregation: object) -> None:
        if not isinstance(module, nn.Module):
            raise WrongTypeError(f"set_aggregation needs a torch.nn.Module; got {type(module).__name__}.")
        if not isinstance(name, str) or name not in own_buffers(module):
            raise InvalidArgumentError(
                f"{type(module).__name__} has no buffer {name!r} of its own; it has {sorted(own_buffers(module))}. For "
                "a child's buffer pass the child."
            )
        parsed, buffer = parse_aggregation(aggregation), own_buffer(module, name)
        if parsed is VariableAggregation.MEAN and buffer is not None and not _has_mean(buffer):
            raise InvalidArgumentError(
                f"set_aggregation({type(module).__name__}, {name!r}, 'mean') for a buffer of {buffer.dtype}: a mean of "
                "integers is none. Say 'sum' for what counts or adds up, or 'only_first_replica'; or register a "
                "floating buffer."
            )
        if parsed is VariableAggregation.SUM and buffer is not None and buffer.dtype == torch.bool:
            raise InvalidArgumentError(
                f"set_aggregation({type(module).__name__}, {name!r}, 'sum') for a buffer of {buffer.dtype}: truth "
                "values do not add up. Say 'only_first_replica', or register a buffer of integers that counts them."
            )
        self._set.setdefault(module, {})[name] = parsed
        BufferRules.changes += 1

    def get(self, module: nn.Module, name: str) -> VariableAggregation | None:
        return self._set.get(module, {}).get(name) if self._set else None

    def note_edited(self, module: nn.Module, name: str) -> None:
        """A step has changed it, although its module is in evaluation mode."""
        self._edited.setdefault(module, set()).add(name)

    def was_edited(self, module: nn.Module, name: str) -> bool:
        return bool(self._edited) and name in self._edited.get(module, ())

    def keeps_own(self, module: nn.Module, name: str) -> bool:
        """Whether every replica keeps its own value from run to run."""
        return self.get(module, name) is VariableAggregation.NONE

    def needs_before(self, module: nn.Module, name: str) -> bool:
        """Whether the value from before the run has to be known after it."""
        return self.get(module, name) is VariableAggregation.SUM

    def aggregation_of(
        self, module: nn.Module, name: str, first: torch.Tensor | None, *, are_alike: bool, training: bool
    ) -> VariableAggregation:
        """What becomes of a buffer that differs between replicas: their mean, the ``first`` one's, or the value from
        before with the changes of all replicas added.

        ``are_alike``: whether all have one shape and dtype. ``training``: whether the module was in training mode.
        """
        only_first = VariableAggregation.ONLY_FIRST_REPLICA
        aggregation = self.get(module, name)
        if not are_alike or first is None:
            self.warn(module, name, "has other shapes or dtypes on other replicas, and is the first replica's")
            return only_first
        if aggregation in (VariableAggregation.SUM, only_first):
            return aggregation
        if not _has_mean(first) or (aggregation is None and first.layout != torch.strided):
            self.warn(module, name, "differs between replicas, and is the first replica's")
            return only_first
        # Of statistics the step may have set the mode for itself.
        if not training and aggregation is None and not is_statistic(module, name):
            self.warn(module, name, "differs between replicas, and is the first replica's (its module does not train)")
            return only_first
        self.warn(module, name, "differs between replicas, and is their mean")
        return VariableAggregation.MEAN

    def look_at_count(self, module: nn.Module, name: str, before: float, after: float, rows: int | None) -> None:
        """A buffer of one element, equal on all replicas: one that grew by a replica's rows counts these."""
        if rows is None or rows < 2 or self.get(module, name) is not None:
            return
        if math.isclose(after - before, rows, rel_tol=1e-4):
            self.warn(module, name, f"has grown by the {rows} rows of one replica on each of them, which counts once")

    def warn(self, module: nn.Module, name: str, what: str) -> None:
        """Say once what is made of a buffer that nobody has spoken of."""
        warned = self._warned.setdefault(module, set())
        if name in warned or self.get(module, name) is not None:
            return
        if is_statistic(module, name):
            if type(module) is nn.SyncBatchNorm and not warned:  # they would be equal, had it met the other replicas
                warned.add(name)
                warnings.warn(_OWN_STATISTICS, stacklevel=6)
            return
        warned.add(name)
        warnings.warn(
            f"buffer {name!r} of {type(module).__name__} {what} after the run. If it counts or adds up, call "
            f"strategy.extended.set_aggregation(module, {name!r}, 'sum'); 'none' lets every replica keep its own, and "
            f"{_meant(own_buffer(module, name))} says that this is meant.",
            stacklevel=6,
        )


def _has_mean(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _meant(buffer: torch.Tensor | None) -> str:
    """What says that the rule is right."""
    return "'only_first_replica'" if buffer is not None and not _has_mean(buffer) else "'mean' or 'only_first_replica'"


def parse_aggregation(value: object) -> VariableAggregation:
    if isinstance(value, VariableAggregation):
        return value
    try:
        return VariableAggregation[str(value).upper()]
    except KeyError:
        known = ", ".join(repr(one.name.lower()) for one in VariableAggregation)
        raise InvalidArgumentError(
            f"unknown aggregation {value!r}; use one of {known}, or a VariableAggregation."
        ) from None


def is_statistic(module: nn.Module, name: str) -> bool:
    """Whether it is one of torch's own running statistics, which the mean over replicas fits."""
    return isinstance(module, _NormBase) and name in ("running_mean", "running_var", "num_batches_tracked")


def batches_counted(module: nn.Module) -> int:
    """Grows where torch's own running statistics of a module may have been written: normalizing leaves no trace in the
    version of any but the count of batches."""
    count = own_buffers(module).get("num_batches_tracked")
    return 0 if count is None or count.is_inference() else version_of(count)


def change_of(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What has been added to it. Nothing to an infinity that is still there."""
    change = tensor - before
    return change if tensor.layout != torch.strided else change.masked_fill_(tensor == before, 0)


def counts_rows(module: nn.Module, name: str, tensor: torch.Tensor | None) -> bool:
    """Whether a buffer is of the kind that `BufferRules.look_at_count` looks at."""
    return (
        tensor is not None
        and tensor.numel() == 1
        and tensor.device.type == "cpu"
        and not (tensor.is_complex() or tensor.dtype == torch.bool)
        and not is_statistic(module, name)
    )
