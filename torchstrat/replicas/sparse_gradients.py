"""Sparse gradients (embeddings) of several ranks, added up. Each rank has its own number of entries, or none."""

from __future__ import annotations

import torch

from torchstrat.distributed.collectives.communicator import Communicator


def sum_of_sparse(
    communicator: Communicator, tensor: torch.Tensor, own: torch.Tensor | None, factor: float, what: str
) -> torch.Tensor:
    """The coalesced sum of the ranks' gradients of ``tensor``, each times its rank's ``factor``; sparse, on its device.

    ``own``: sparse COO, of the shape of ``tensor``; None on ranks that have none.
    """
    dims = [int(dim) for dim in communicator.all_gather(torch.tensor([0 if own is None else own.sparse_dim()]), what)]
    dim = min(dim for dim in dims if dim)
    if own is None:
        own = _without_entries(tensor, dim)
    elif own.sparse_dim() != dim:
        own = own.to_dense().to_sparse(dim)
    own = own.coalesce()
    return _gather(communicator, own.indices(), own.values() * factor, own.shape, what)


def _without_entries(tensor: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.zeros(sparse_dim, 0, dtype=torch.int64, device=tensor.device),
        tensor.new_zeros(0, *tensor.shape[sparse_dim:]).detach(),
        tensor.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _gather(
    communicator: Communicator, indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, what: str
) -> torch.Tensor:
    """Entries padded to the longest, gathered, cut and joined. ``indices``: (sparse_dim, n); ``values``: (n, …)."""
    counts = [int(n) for n in communicator.all_gather(torch.tensor([values.shape[0]]), what)]
    padded_indices = indices.new_zeros(indices.shape[0], max(counts))
    padded_indices[:, : indices.shape[1]] = indices
    padded_values = values.new_zeros(max(counts), *values.shape[1:])
    padded_values[: values.shape[0]] = values
    all_indices = communicator.all_gather(padded_indices, what)
    all_values = communicator.all_gather(padded_values, what)
    return torch.sparse_coo_tensor(
        torch.cat([one[:, :count] for one, count in zip(all_indices, counts, strict=True)], dim=1),
        torch.cat([one[:count] for one, count in zip(all_values, counts, strict=True)]),
        shape,
        check_invariants=False,  # joined from tensors that hold them; torch warns unless told
    ).coalesce()
