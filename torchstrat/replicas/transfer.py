"""Many tensors from one rank to the others, in few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchstrat.collectives.communicator import Communicator

_CHUNK_BYTES = 32 << 20


def broadcast_tensors(communicator: Communicator, tensors: Sequence[torch.Tensor], source: int, what: str) -> None:
    """Overwrite ``tensors`` with those of rank ``source``. All ranks pass tensors of equal shapes, in one order."""
    with torch.no_grad():
        for chunk in _chunks([tensor for tensor in tensors if tensor.layout == torch.strided]):
            flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
            communicator.broadcast(flat, source, what)
            if communicator.rank != source:
                for tensor, piece in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                    tensor.copy_(piece.view(tensor.shape))
        for tensor in tensors:
            if tensor.layout != torch.strided:
                received = communicator.broadcast_object(tensor if communicator.rank == source else None, source, what)
                if communicator.rank != source:
                    tensor.copy_(received)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype and device, together at most 32 MiB (or a single one)."""
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and (tensor.dtype != chunk[0].dtype or tensor.device != chunk[0].device or held + size > _CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += size
    if chunk:
        yield chunk
