"""Recurrent layers: their cells written out, for ``vmap``; whole sequences are refused, for ``vmap`` has no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch.nn import functional as F

from torchstrat.core.errors import UnsupportedError

Tensor = torch.Tensor


def lstm_cell(
    input: Tensor,  # noqa: A002 - torch's name
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch.lstm_cell`, of `torch.nn.LSTMCell`. ``input``: ``(rows, inputs)``, ``hx``: two of ``(rows, hidden)``."""
    hidden, cell = hx
    gates = F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)
    into, forget, new, out = gates.chunk(4, dim=-1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def gru_cell(
    input: Tensor,  # noqa: A002 - torch's name
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """`torch.gru_cell`, of `torch.nn.GRUCell`. ``input``: ``(rows, inputs)``, ``hx``: ``(rows, hidden)``."""
    from_input = F.linear(input, w_ih, b_ih).chunk(3, dim=-1)
    from_hidden = F.linear(hx, w_hh, b_hh).chunk(3, dim=-1)
    reset, keep = ((ours + theirs).sigmoid() for ours, theirs in zip(from_input[:2], from_hidden[:2], strict=True))
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    return new + keep * (hx - new)


def rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """`torch.rnn_tanh_cell` or `torch.rnn_relu_cell`, of `torch.nn.RNNCell`."""

    def cell(
        input: Tensor,  # noqa: A002 - torch's name
        hx: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:
        return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


def refuse(layer: str) -> Callable[..., NoReturn]:
    """What stands for a function over whole sequences."""

    def refused(*_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{layer} cannot run replica by replica on a TPU, since torch.vmap has no rule for it; run the step with "
            f"ts.RunOptions(global_view=True), or loop over {layer}Cell."
        )

    return refused
