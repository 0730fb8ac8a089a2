"""Central storage in memory that processes share: what needs no second process to be shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from tests.unit.optimizer_settings import SETTINGS, WHOLE, numbers
from torchstrat.collectives.shared_memory import common_memory, own_pages
from torchstrat.collectives.shared_memory.common_memory import CommonMemory, Kind, kind_of, size_of
from torchstrat.collectives.shared_memory.segment import Segment
from torchstrat.optimizer_tiers import Tier, tier_of
from torchstrat.replicas.central.portions import Work, portions

PAGE = own_pages.PAGE_BYTES

needs_private_pages = pytest.mark.skipif(common_memory.why_not() is not None, reason=str(common_memory.why_not()))

# -- who steps what -------------------------------------------------------------------------------------------------

WORKS = {
    "one large": [Work(1_000_003, 4, True)],
    "an MLP": [Work(802_816, 4, True), Work(1024, 4, True), Work(1_048_576, 4, True), Work(10, 4, True)],
    "whole ones among them": [Work(100_000, 8, True), Work(50_000, 8, False), Work(70_000, 4, False), Work(0, 4, True)],
    "small ones": [Work(7, 4, True)] * 9,
    "none": [],
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("works", WORKS.values(), ids=WORKS)
def test_every_element_is_stepped_by_one_rank(works: list[Work], ranks: int) -> None:
    shares = portions(works, ranks)
    assert len(shares) == ranks
    seen: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(works))}
    for share in shares:
        assert share == sorted(share)
        for part in share:
            seen[part.number].append((part.start, part.stop))
    for number, work in enumerate(works):
        pieces = sorted(seen[number])
        assert pieces[0][0] == 0
        assert pieces[-1][1] == work.numel
        assert all(one[1] == other[0] for one, other in itertools.pairwise(pieces))
        assert work.may_be_cut or len(pieces) == 1


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_portions_are_even(ranks: int) -> None:
    works = WORKS["an MLP"]
    loads = [sum((part.stop - part.start) * 4 for part in share) for share in portions(works, ranks)]
    assert max(loads) - min(loads) <= 2 * 256 * 4 + 40


# -- a step of parts is the step of the whole -----------------------------------------------------------------------


def stepped(make: Callable[[Any], optim.Optimizer], dtype: torch.dtype, cuts: list[int]) -> torch.Tensor:
    """A parameter after seven steps of its parts between ``cuts``."""
    size = cuts[-1]
    start, *gradients = numbers(8, size, dtype)
    parts = [torch.nn.Parameter(start[low:high].clone()) for low, high in itertools.pairwise(cuts)]
    optimizer = make(parts)
    for number, gradient in enumerate(gradients):
        for part, low, high in zip(parts, cuts, cuts[1:], strict=False):
            part.grad = gradient[low:high].clone()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (1 - 0.05 * number)
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS)
def test_parts_are_stepped_to_the_same_bits(make: Callable[[Any], optim.Optimizer], dtype: torch.dtype) -> None:
    assert tier_of(make([torch.nn.Parameter(torch.zeros(1))])) is Tier.ELEMENTS
    size = 5003
    shares = portions([Work(size, dtype.itemsize, True)], 3)
    cuts = [0, *(share[0].stop for share in shares)]
    assert len(cuts) == 4
    assert cuts[-1] == size
    assert torch.equal(stepped(make, dtype, cuts), stepped(make, dtype, [0, size]))


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_the_comparison_notices_who_looks_at_the_whole(make: Callable[[Any], optim.Optimizer]) -> None:
    assert tier_of(make([torch.nn.Parameter(torch.zeros(2, 2))])) is Tier.PARAMETERS
    cuts = [0, 256, 5003]
    assert not torch.equal(stepped(make, torch.float32, cuts), stepped(make, torch.float32, [0, 5003]))


def test_all_elementwise_optimizers_of_the_list_are_tried() -> None:
    from torchstrat import optimizer_tiers as tiers

    tried = {type(make([torch.nn.Parameter(torch.zeros(1))])) for make in SETTINGS.values()}
    assert tried == {cls for cls, kind in tiers._KINDS.items() if kind.tier is Tier.ELEMENTS}


def test_what_is_not_known_is_stepped_at_once() -> None:
    class Mine(optim.Adam):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert tier_of(Mine(parameters)) is Tier.ALL
    assert tier_of(optim.LBFGS(parameters)) is Tier.ALL
    assert tier_of(optim.SGD(parameters, differentiable=True)) is Tier.ALL


# -- common memory --------------------------------------------------------------------------------------------------


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
    assert place.shown[7, 3] == 1.0
    assert place.shown[7, 4] == 3.0
    assert place.shown[8, 0] == 1.0


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
    """The control of `why_not`: without private mappings it says so."""
    monkeypatch.setattr(common_memory.mmap, "MAP_PRIVATE", common_memory.mmap.MAP_SHARED)
    assert common_memory.why_not() is not None


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
    kinds = [kind_of(tensor) for tensor in tensors]
    assert None not in kinds
    memory = memory_of(*kinds)  # type: ignore[arg-type]
    places = memory.places(kinds)  # type: ignore[arg-type]
    for tensor, place in zip(tensors, places, strict=True):
        place.written.copy_(tensor)
    for tensor, place in zip(tensors, places, strict=True):
        assert torch.equal(place.shown, tensor)
        assert place.shown.stride() == tensor.stride()
        assert place.shown.untyped_storage().nbytes() == math.prod(tensor.shape) * tensor.element_size()


def test_what_has_no_place_for_each_element_gets_none() -> None:
    assert kind_of(torch.zeros(1).expand(4)) is None
    assert kind_of(torch.zeros(4, 4)[:, :2]) is None
    assert kind_of(torch.zeros(2, device="meta")) is None
    assert kind_of(torch.eye(2).to_sparse()) is None
    assert kind_of(torch.zeros(2, dtype=torch.complex64).conj()) is None
