"""Tensors that travel beside a pickle, as copies of their values."""

from __future__ import annotations

import torch


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """The values as they are now: contiguous, on the CPU, without history, of no shared storage."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.device.type != "cpu":
            return plain.cpu().contiguous()
        return plain.clone(memory_format=torch.contiguous_format)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values lie in one block of memory, as most do."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )
