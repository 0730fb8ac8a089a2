"""What the TPU backend computes in place of some functions of PyTorch, while it records a step.

Three reasons: the compiler does not cut an operation over logical devices (normalisations), it computes something else
(running statistics, gradients of ELU, of convolutions in groups), or ``vmap`` has no rule for it and runs the replicas
one by one (losses over classes, ``embedding_bag``). Every replacement takes what the original takes and gives its
values and gradients; `elementwise` says of losses what they cannot refuse. Whole recurrent layers are an error.

Imports from `core` and `sharding/tpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn import functional as F

from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.tpu.limits import refusals
from torchstrat.sharding.tpu.rewrites import elementwise, indexing, normalization, signals
from torchstrat.sharding.tpu.rewrites.normalization import BatchNormalization, TensorMap

__all__ = ["Rewrites"]

Function = Callable[..., Any]


def _in_torchs_order(normalization: Function) -> Function:
    """For ``torch.…`` instead of ``torch.nn.functional.…``, whose parameters come in another order."""

    def ordered(
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        *options: float,
        cudnn_enabled: bool = True,
        **named: float,
    ) -> torch.Tensor:
        result: torch.Tensor = normalization(input, running_mean, running_var, weight, bias, *options[:3], **named)
        return result

    return ordered


def _refuse_sequences(layer: str) -> Callable[..., NoReturn]:
    """What stands for a function over whole sequences."""

    def refused(*_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{layer} cannot run replica by replica on a TPU, since torch.vmap has no rule for it; run the step with "
            f"ts.RunOptions(global_view=True), or loop over {layer}Cell."
        )

    return refused


_EVERYWHERE: dict[object, Function] = {
    F.layer_norm: normalization.layer_norm,
    torch.layer_norm: normalization.layer_norm,
    F.rms_norm: normalization.rms_norm,
    torch.rms_norm: normalization.rms_norm,
    F.group_norm: normalization.group_norm,
    torch.group_norm: normalization.group_norm,
    F.cross_entropy: elementwise.cross_entropy,
    F.nll_loss: elementwise.nll_loss,
    F.smooth_l1_loss: elementwise.smooth_l1_loss,
    F.kl_div: elementwise.kl_div,
    F.gaussian_nll_loss: elementwise.gaussian_nll_loss,
    **elementwise.functions(),
    **signals.functions(),
    **indexing.functions(),
    **signals.transforms(),
    **refusals(),
    torch.lstm_cell: elementwise.lstm_cell,
    torch.gru_cell: elementwise.gru_cell,
    torch.rnn_tanh_cell: elementwise.rnn_cell(torch.tanh),
    torch.rnn_relu_cell: elementwise.rnn_cell(torch.relu),
    torch.lstm: _refuse_sequences("LSTM"),
    torch.gru: _refuse_sequences("GRU"),
    torch.rnn_tanh: _refuse_sequences("RNN"),
    torch.rnn_relu: _refuse_sequences("RNN"),
}


class Rewrites:
    """The replacements for the replicas of one run.

    ``first_replica`` gives the first replica's part of a tensor that differs between replicas, and any other tensor
    itself: running statistics are one for all replicas, unless ``is_own`` says otherwise. ``sum_over_replicas`` is for
    `sync_batch_norm` only. ``on_reading`` is called where such statistics are read that were changed before.
    ``logical_devices``: how many devices compute one replica.
    """

    def __init__(
        self,
        first_replica: TensorMap,
        sum_over_replicas: TensorMap | None = None,
        is_own: Callable[[torch.Tensor], bool] | None = None,
        *,
        on_reading: Callable[[], None] = lambda: None,
        logical_devices: int = 1,
    ) -> None:
        batch = BatchNormalization(first_replica, sum_over_replicas, is_own, on_reading)
        self.sync_batch_norm: Function = batch.sync_batch_norm
        self._found: dict[Any, Function] = {
            **_EVERYWHERE,
            **(signals.convolutions() if logical_devices > 1 else {}),
            F.batch_norm: batch.batch_norm,
            torch.batch_norm: _in_torchs_order(batch.batch_norm),
            F.instance_norm: batch.instance_norm,
            torch.instance_norm: _in_torchs_order(batch.instance_norm),
        }

    def find(self, func: object) -> Function | None:
        """What to call instead of ``func``, as a `torch.overrides.TorchFunctionMode` gets it; None for ``func``.

        It is called with the arguments of ``func``, outside of the mode.
        """
        try:
            return self._found.get(func)
        except TypeError:  # some of PyTorch's own callables cannot be hashed
            return None
