"""Memory that processes share and that each may write to for itself: what needs no second process to be shown."""

from __future__ import annotations

import math

import pytest
import torch

from torchstrat.collectives.shared_memory import common_memory, own_pages
from torchstrat.collectives.shared_memory.common_memory import CommonMemory, Kind, kind_of, size_of
from torchstrat.collectives.shared_memory.segment import Segment
from torchstrat.testing.fake_device import why_no_common_memory

PAGE = own_pages.PAGE_BYTES
needs_private_pages = pytest.mark.skipif(why_no_common_memory() is not None, reason=str(why_no_common_memory()))


def memory_of(*kinds: Kind) -> CommonMemory:
    return CommonMemory(Segment.allocate(size_of(kinds)))


@pytest.fixture(params=["ioctl", "pread"])
def way_to_tell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel picks the pages, or, before Linux 6.7, all are looked at."""
    if request.param == "pread":
        monkeypatch.setattr(own_pages, "_SCAN", 0)
    return str(request.param)


@needs_private_pages
@pytest.mark.usefixtures("way_to_tell")
def test_pages_that_were_written_to_are_told_apart() -> None:
    kind = Kind((1000, 1024), (1024, 1), torch.float32)
    memory = memory_of(kind)
    [place] = memory.places([kind])
    place.written.fill_(1.0)
    assert place.shown.sum() == kind.bytes / 4
    assert memory.edits() == []
    place.shown[7, 3] = 5.0
    place.shown.data[8:10] *= 2.0
    assert memory.edits() == [(7 * PAGE, 10 * PAGE)]
    assert place.written[7, 3] == 1.0
    place.written[7, 4] = 3.0
    assert place.shown[7, 4] == 1.0, "a page of its own no longer shows what others write"
    memory.forget(memory.edits())
    assert memory.edits() == []
    assert [float(place.shown[at]) for at in ((7, 3), (7, 4), (8, 0))] == [1.0, 3.0, 1.0]


@needs_private_pages
@pytest.mark.usefixtures("way_to_tell")
def test_many_scattered_edits() -> None:
    kind = Kind((600 * PAGE,), (1,), torch.uint8)
    memory = memory_of(kind)
    [place] = memory.places([kind])
    place.shown[:: 2 * PAGE] = 1
    assert memory.edits() == [(page * PAGE, (page + 1) * PAGE) for page in range(0, 600, 2)]
    memory.publish(memory.edits())
    assert int(place.written.sum()) == 300
    memory.forget(memory.edits())
    assert memory.edits() == []
    assert int(place.shown.sum()) == 300


@needs_private_pages
def test_the_test_notices_a_shared_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_memory.mmap, "MAP_PRIVATE", common_memory.mmap.MAP_SHARED)
    assert why_no_common_memory() is not None


def test_places_do_not_overlap_and_keep_their_form() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.tensor(2.0),
        torch.randn(7, dtype=torch.complex64),
        torch.randn(7).to(torch.bfloat16),
        torch.zeros(0, 3),
    ]
    kinds = [kind for tensor in tensors if (kind := kind_of(tensor)) is not None]
    places = memory_of(*kinds).places(kinds)
    for tensor, place in zip(tensors, places, strict=True):
        place.written.copy_(tensor)
    for tensor, place in zip(tensors, places, strict=True):
        assert torch.equal(place.shown, tensor)
        assert place.shown.stride() == tensor.stride()
        assert place.shown.untyped_storage().nbytes() == math.prod(tensor.shape) * tensor.element_size()


NO_PLACES = {
    "expanded": torch.zeros(1).expand(4),
    "with gaps": torch.zeros(4, 4)[:, :2],
    "elsewhere": torch.zeros(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "conjugated": torch.zeros(2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("tensor", NO_PLACES.values(), ids=NO_PLACES)
def test_what_has_no_place_for_each_element_gets_none(tensor: torch.Tensor) -> None:
    assert kind_of(tensor) is None
