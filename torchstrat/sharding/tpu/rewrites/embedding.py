"""`embedding_bag` by `embedding`, because ``vmap`` would run the original replica by replica."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def embedding_bag(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.embedding_bag`. ``input``: ``(bags, ids)``, or ``(ids,)`` with ``offsets`` ``(bags,)``.

    The original is called, one replica after the other, for what does not take apart into plain tensor operations:
    ``max_norm`` (which changes ``weight``), ``scale_grad_by_freq``, ``sparse``, and maxima over bags of any length.
    """
    unusual = max_norm is not None or scale_grad_by_freq or sparse or (mode == "max" and offsets is not None)
    malformed = input.dim() != (2 if offsets is None else 1) or mode not in ("sum", "mean", "max")
    if per_sample_weights is not None:
        malformed = malformed or mode != "sum" or per_sample_weights.shape != input.shape
    if unusual or malformed:  # the latter raises
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input.long(), weight, padding_idx)  # (*input.shape, features)
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    kept = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    if mode == "max":
        largest = rows.masked_fill(~kept.unsqueeze(-1), float("-inf")).max(dim=1).values
        return torch.where(kept.any(dim=1).unsqueeze(-1), largest, 0)
    rows = rows.masked_fill(~kept.unsqueeze(-1), 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(dim=1), kept.sum(dim=1)
    else:
        total, count = _sums(offsets, include_last_offset, rows, kept)
    return total if mode == "sum" else total / count.clamp(min=1).to(total.dtype).unsqueeze(-1)


def _sums(
    offsets: torch.Tensor, include_last: bool, rows: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``(ids, features)`` and ``kept`` ``(ids,)`` summed per bag; a bag ends where the next one starts."""
    position = torch.arange(rows.shape[0], device=rows.device)
    bag = (position.unsqueeze(1) >= offsets).sum(dim=1) - 1
    bags = offsets.shape[0]
    total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
    count = kept.new_zeros(bags, dtype=torch.long).index_add(0, bag, kept.long())
    return (total[:-1], count[:-1]) if include_last else (total, count)
