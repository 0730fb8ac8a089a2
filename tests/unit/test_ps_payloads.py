"""Values as one pickle with the tensors beside it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchstrat.parameter_server.wire.payloads import pack, unpack


@dataclass(frozen=True)
class Message:
    name: str
    values: tuple[torch.Tensor, ...]


def travel(value: Any) -> Any:
    return unpack(pack(value))


def test_tensors_anywhere_travel_beside_the_pickle_which_alone_is_no_value() -> None:
    message = Message("push", (torch.arange(1000), torch.ones(3, 4)))
    packed = pack({"a": [message, 3]})
    assert len(packed.tensors) == 2
    assert len(packed.data) < 500
    arrived = unpack(packed)["a"][0]
    assert arrived.name == "push"
    assert all(torch.equal(there, here) for there, here in zip(arrived.values, message.values, strict=True))
    with pytest.raises(pickle.UnpicklingError, match="beside this pickle"):
        pickle.loads(packed.data)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 5), torch.ones(4, 5).t(), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ids=["plain", "transposed", "channels_last"],
)
def test_a_tensor_that_owns_its_storage_is_not_copied_to_be_sent(tensor: torch.Tensor) -> None:
    (sent,) = pack(tensor).tensors
    assert sent.data_ptr() == tensor.data_ptr()
    assert sent.stride() == tensor.stride()


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(10.0)[2:4],
        torch.arange(10.0)[1:],
        torch.arange(10.0)[::2],
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0)[3],
        torch.arange(10.0)[:0],
    ],
    ids=["small", "large", "strided", "columns", "expanded", "scalar", "empty"],
)
def test_a_view_brings_what_it_shows_and_no_more(view: torch.Tensor) -> None:
    (sent,) = pack(view).tensors
    assert sent.untyped_storage().nbytes() == view.numel() * view.itemsize
    assert torch.equal(sent, view)


def test_history_stays_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for value in (parameter, parameter * 2):
        arrived = travel(value)
        assert type(arrived) is torch.Tensor
        assert not arrived.requires_grad
        assert arrived.grad_fn is None
        assert torch.equal(arrived, value)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    for value in (torch.tensor([[0, 1], [1, 0]]).to(dtype), torch.tensor(1).to(dtype)):
        arrived = travel(value)
        assert arrived.dtype == dtype
        assert arrived.tolist() == value.tolist()


def test_lazily_conjugated_and_negated_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = pack(value.conj()).tensors[0]
    assert torch.equal(conjugate, torch.tensor([1 - 2j, 3 + 4j]))
    assert not conjugate.is_conj()
    assert torch.equal(pack(value.conj().imag).tensors[0], torch.tensor([-2.0, 4.0]))


def test_tensors_without_plain_memory_travel_inside_or_in_parts() -> None:
    assert travel(torch.empty(3, 4, device="meta")).shape == (3, 4)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    assert [row.shape[0] for row in travel(jagged).unbind()] == [2, 1]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    assert len(pack(sparse).tensors) == 2
    arrived = travel(sparse)
    assert not arrived.is_coalesced(), "its repeated rows stay"
    assert torch.equal(arrived.to_dense(), sparse.to_dense())


def test_one_tensor_twice_is_one_and_two_of_one_storage_are_two() -> None:
    value = torch.ones(2)
    packed = pack([value, value])
    assert len(packed.tensors) == 1
    first, second = unpack(packed)
    assert first is second
    first, second = pack([value, value.detach(), torch.empty(0), torch.empty(0)]).tensors[:2]
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(Exception, match="lambda"):
        pack(lambda: None)
