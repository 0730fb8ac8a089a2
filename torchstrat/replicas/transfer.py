"""Many tensors from one rank to the others, in few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchstrat.core.communicator import Communicator
from torchstrat.core.tensor_bytes import bytes_of

_CHUNK_BYTES = 32 << 20


def broadcast_tensors(communicator: Communicator, tensors: Sequence[torch.Tensor], source: int, what: str) -> None:
    """Overwrite ``tensors`` with those of rank ``source``. All ranks pass tensors of equal shapes, dtypes and layouts,
    in one order; and the tensors themselves, since the scale of a quantized one is not in the memory that another view
    of it shares."""
    if not tensors:
        return
    with torch.no_grad():
        for chunk in _chunks([_once(tensor.detach()) for tensor in tensors if _is_dense(tensor)]):
            if len(chunk) == 1 and _goes_as_it_is(chunk[0]):  # large ones are alone: no copy of them
                communicator.broadcast(chunk[0], source, what)
                continue
            flat = torch.cat([_bytes(tensor) for tensor in chunk])  # not all dtypes can be joined as they are
            communicator.broadcast(flat, source, what)
            if communicator.rank != source:
                pieces = flat.view(chunk[0].dtype).split([tensor.numel() for tensor in chunk])
                for tensor, piece in zip(chunk, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))
        for tensor in tensors:
            if not _is_dense(tensor):
                received = communicator.broadcast_object(tensor if communicator.rank == source else None, source, what)
                if communicator.rank != source:
                    tensor.copy_(received)


def average_tensors(communicator: Communicator, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Overwrite ``tensors`` with their means over all ranks, which get the same bits. All ranks pass dense tensors of
    equal shapes and floating dtypes, in one order."""
    with torch.no_grad():
        for chunk in _chunks([_once(tensor.detach()) for tensor in tensors]):
            total = torch.cat([tensor.reshape(-1) for tensor in chunk])
            if total.dtype == torch.float16:  # the sum may not exist where the mean does
                total.div_(communicator.size)
            communicator.all_reduce(total, what).wait()
            if total.dtype != torch.float16:
                total.div_(communicator.size)
            for tensor, piece in zip(chunk, total.split([tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def broadcast_gradients(
    communicator: Communicator,
    gradients: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
    source: int,
    what: str,
) -> list[torch.Tensor | None]:
    """The gradients of rank ``source`` for the tensors ``like``, which may be missing or sparse there and not here.

    Dense ones that exist here are overwritten in place.
    """
    kinds = communicator.broadcast_object([_kind(gradient) for gradient in gradients], source, what)
    is_source = communicator.rank == source
    received: list[torch.Tensor | None] = []
    for gradient, tensor, kind in zip(gradients, like, kinds, strict=True):
        if kind == "sparse" and not is_source:
            gradient = communicator.broadcast_object(None, source, what).to(tensor.device)
        elif kind == "sparse":
            communicator.broadcast_object(gradient, source, what)
        elif kind == "dense" and _kind(gradient) != "dense":
            gradient = torch.empty_like(tensor, requires_grad=False)
        received.append(None if kind is None else gradient)
    dense = [one.detach() for one, kind in zip(received, kinds, strict=True) if one is not None and kind == "dense"]
    broadcast_tensors(communicator, dense, source, what)
    return received


def _kind(gradient: torch.Tensor | None) -> str | None:
    if gradient is None:
        return None
    return "dense" if gradient.layout == torch.strided else "sparse"


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of one that is expanded, so that each element is there, and is written, once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all of it: a quantized one has a scale beside them, and cannot be seen as bytes."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def _goes_as_it_is(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor.resolve_conj().resolve_neg().contiguous())


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
