"""Shared memory among threads that stand for processes: the same code over the same memory, without any sockets."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstrat.core import gradients
from torchstrat.distributed.collectives.shared_memory import common_memory, in_place_sum, lockstep
from torchstrat.distributed.collectives.shared_memory.common_memory import (
    CommonMemory,
    Kind,
    NoRoomError,
    Segment,
    kind_of,
    size_of,
)
from torchstrat.distributed.collectives.shared_memory.in_place_sum import Blocks, InPlaceSum, Piece, make_chunks
from torchstrat.distributed.collectives.shared_memory.lockstep import Lockstep, PeersMissingError
from torchstrat.testing.fake_device import why_no_common_memory

pytestmark = pytest.mark.skipif(lockstep.why_not() is not None, reason=str(lockstep.why_not()))

SECONDS = 30.0


@pytest.fixture
def pidfds() -> Iterator[list[int]]:
    """Descriptors of three processes that live: this one."""
    found = [os.pidfd_open(os.getpid()) for _ in range(3)]
    yield found
    for descriptor in found:
        os.close(descriptor)


class Threads:
    """What `Blocks` asks of `Neighbours`, for ranks that are threads of this process."""

    def __init__(self, descriptor: int, pidfds: list[int]) -> None:
        self._descriptor, self.processes = descriptor, tuple(pidfds)

    def share(self, size: int) -> Segment:
        return Segment(os.dup(self._descriptor), size)


def on_ranks(size: int, pidfds: list[int], work: Callable[[Blocks], Any]) -> list[Any]:
    memory = Segment.allocate(1 << 22)

    def run(rank: int) -> Any:
        return work(Blocks(Threads(memory.descriptor, pidfds[:size]), rank, size))  # type: ignore[arg-type]

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))
    finally:
        memory.close()


def test_a_segment_is_zero_and_seen_through_every_mapping() -> None:
    one = Segment.allocate(8192)
    other = Segment(os.dup(one.descriptor), 8192)
    assert not one.tensor(torch.uint8, 0, 8192).any()
    one.tensor(torch.float32, 4096, 2).copy_(torch.tensor([1.5, 2.5]))
    assert other.tensor(torch.float32, 4096, 2).tolist() == [1.5, 2.5]
    one.close()
    other.close()


def test_nobody_can_cut_a_segment_short() -> None:
    memory = Segment.allocate(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 4096)
    memory.close()


def test_too_little_memory_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_memory, "available_bytes", lambda: 100 << 20)
    with pytest.raises(NoRoomError, match=r"209,715,200 bytes of shared memory are needed, and 104,857,600 are left"):
        Segment.allocate(200 << 20)


def test_a_full_device_is_an_error_and_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("os.posix_fallocate", side_effect=full),
        pytest.raises(NoRoomError, match="4,096 bytes of shared memory are needed: No space left"),
    ):
        Segment.allocate(4096)
    assert len(os.listdir("/proc/self/fd")) <= before


def locksteps(size: int, pidfds: list[int]) -> list[Lockstep]:
    memory = Segment.allocate(4096)
    memory.close()
    return [Lockstep(memory, rank, size, pidfds[:size]) for rank in range(size)]


@pytest.mark.parametrize("looks", [0, 1000])
def test_nobody_is_ahead_by_more_than_a_step(pidfds: list[int], looks: int) -> None:
    ranks = locksteps(3, pidfds)
    steps = [0, 0, 0]

    def go(rank: int) -> None:
        ranks[rank]._looks = looks
        for step in range(1, 201):
            ranks[rank].meet(SECONDS)
            steps[rank] = step
            assert min(steps) >= step - 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(go, range(3)))


def test_counts_wrap_around(pidfds: list[int]) -> None:
    ranks = locksteps(2, pidfds)
    for one in ranks:
        one._count = 0xFFFFFFFD
        one._words[one._mine] = one._count

    def go(one: Lockstep) -> None:
        for _ in range(8):
            one.meet(SECONDS)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(go, ranks))
    assert [one._count for one in ranks] == [5, 5]


def missing(first: Lockstep, seconds: float = SECONDS) -> tuple[tuple[int, ...], ...]:
    """Who is late, has ended and has closed, for who is there."""
    with pytest.raises(PeersMissingError) as raised:
        first.meet(seconds)
    return raised.value.late, raised.value.ended, raised.value.closed


def test_who_is_late_is_named(pidfds: list[int]) -> None:
    first, second, _ = locksteps(3, pidfds)

    def come() -> None:
        with contextlib.suppress(PeersMissingError):
            second.meet(0.3)

    helper = threading.Thread(target=come)
    helper.start()
    assert missing(first, 0.3) == ((2,), (), ())
    helper.join()


def test_who_has_left_is_not_waited_for(pidfds: list[int]) -> None:
    first, second = locksteps(2, pidfds)
    second.leave()
    assert missing(first) == ((), (), (1,))


def test_who_has_died_is_waited_for_only_if_it_has_come(pidfds: list[int]) -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    dead = os.pidfd_open(child)
    first, second, _ = locksteps(3, [pidfds[0], dead, pidfds[1]])
    second._words[second._mine] = 1
    assert missing(first, 0.3) == ((2,), (), ())  # the dead one's part was done
    assert missing(first)[1] == (1,)
    os.waitpid(child, 0)
    os.close(dead)


@settings(max_examples=200, deadline=None)
@given(
    numels=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    size=st.integers(2, 8),
    block_bytes=st.sampled_from([1024, 2048, 8192]),
)
def test_every_element_is_in_one_portion(numels: list[int], itemsize: int, size: int, block_bytes: int) -> None:
    with mock.patch.object(in_place_sum, "BLOCK_BYTES", block_bytes):
        chunks = make_chunks.__wrapped__(tuple(numels), itemsize, size)
    covered = [[0] * numel for numel in numels]
    for chunk in chunks:
        assert len(chunk) == size
        for rank, portion in enumerate(chunk):
            assert portion.stop - portion.start == sum(portion.sizes)
            # One place per rank in all chunks: what is read of a chunk is not where the next but one is written.
            room = block_bytes // size
            assert rank * room - 64 * size <= portion.start * itemsize
            assert portion.start == chunks[0][rank].start
            assert portion.stop * itemsize <= block_bytes
            if rank:
                assert chunk[rank - 1].stop <= portion.start
            for index, start, stop in portion.pieces:
                for element in range(start, stop):
                    covered[index][element] += 1
    assert all(count == 1 for tensor in covered for count in tensor)


SHAPES = {
    "small": [(5,), (3, 4)],
    "one chunk": [(20_000,)],
    "many chunks": [(300_000,), (7,), (1,), (250_000,), (3, 70_000)],
    "many pieces": [(100,)] * 300,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_sums_are_those_of_a_loop_in_the_order_of_ranks_and_owners_get_their_parts(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, size: int, pidfds: list[int]
) -> None:
    """Each tensor is cut at thirds and its pieces are dealt out, to some ranks more than to others."""
    generator = torch.Generator().manual_seed(1)
    parts = [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        for _ in range(size)
    ]
    owned: list[list[Piece]] = [[] for _ in range(size)]
    for number, shape in enumerate(shapes):
        cuts = [math.prod(shape) * third // 3 for third in range(4)]
        for place, (start, stop) in enumerate(itertools.pairwise(cuts)):
            owned[(number + place) % size].append(Piece(number, start, stop))

    def work(blocks: Blocks) -> list[tuple[float, list[torch.Tensor], list[torch.Tensor]]]:
        add_up = InPlaceSum(blocks, lambda: blocks.lockstep.meet(SECONDS))
        results = []
        for factor in (1.0, 0.5, 1.0):  # several in a row take turns with the same blocks
            mine, whole = ([part.clone() for part in parts[blocks.rank]] for _ in range(2))
            add_up.to_owners(mine, factor, owned)
            add_up(whole, factor)
            results.append((factor, mine, whole))
        return results

    totals = [functools.reduce(torch.add, each) for each in zip(*parts, strict=True)]
    is_small = sum(total.nbytes for total in totals) <= in_place_sum.SMALL_BYTES
    for rank, results in enumerate(on_ranks(size, pidfds, work)):
        for factor, mine, whole in results:
            assert all(torch.equal(one, total * factor) for one, total in zip(whole, totals, strict=True))
            for number, start, stop in owned[rank]:
                assert torch.equal(mine[number].view(-1)[start:stop], whole[number].view(-1)[start:stop])
            assert is_small == all(map(torch.equal, mine, whole))


def test_what_was_first_summed_in_inference_mode_is_summed_elsewhere(pidfds: list[int]) -> None:
    def work(blocks: Blocks) -> list[torch.Tensor]:
        add_up = InPlaceSum(blocks, lambda: blocks.lockstep.meet(SECONDS))
        with torch.inference_mode():
            first = torch.ones(3)
            add_up([first], 0.5)
        then = torch.full((3,), 2.0, requires_grad=True)
        add_up([then], 0.5)
        with torch.inference_mode():
            add_up([first], 0.25)
        return [first.clone(), then.detach()]

    for first, then in on_ranks(2, pidfds, work):
        assert first.tolist() == [0.5] * 3
        assert then.tolist() == [2.0] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_small_tensors_travel_behind_a_message(size: int, pidfds: list[int]) -> None:
    message = bytes(range(100))

    def work(blocks: Blocks) -> Iterator[bool]:
        add_up = InPlaceSum(blocks, lambda: blocks.lockstep.meet(SECONDS))
        for number in range(40):  # more kinds than are kept, and blocks are written again and again
            parts = [torch.randn(number + 1, 3), torch.randn(7)]
            whole = [part.clone() for part in parts]
            turn = blocks.take_turns(1)
            blocks.rows[turn][blocks.rank][: len(message)] = message
            finish = add_up.publish_small(parts, turn, after_bytes=len(message))
            blocks.lockstep.meet(SECONDS)
            yield all(row[: len(message)] == message for row in blocks.rows[turn])
            assert finish is not None
            finish(0.5)
            add_up(whole, 0.5)
            yield all(map(torch.equal, parts, whole))

    for found in on_ranks(size, pidfds, lambda blocks: list(work(blocks))):
        assert len(found) == 80
        assert all(found)


@pytest.mark.parametrize(
    "tensors",
    [[torch.ones(in_place_sum.SMALL_BYTES // 4 + 1)], [torch.ones(2), torch.ones(2, dtype=torch.float64)]],
    ids=["too many", "of two dtypes"],
)
def test_others_do_not(tensors: list[torch.Tensor], pidfds: list[int]) -> None:
    def work(blocks: Blocks) -> bool:
        add_up = InPlaceSum(blocks, lambda: None)
        return add_up.publish_small(tensors, 0, after_bytes=0) is None and not any(blocks.rows[0][blocks.rank])

    assert on_ranks(2, pidfds, work) == [True, True]


# -- memory that processes have in common ------------------------------------------------------------------------------


PAGE = common_memory.PAGE_BYTES
needs_private_pages = pytest.mark.skipif(why_no_common_memory() is not None, reason=str(why_no_common_memory()))


def memory_of(*kinds: Kind) -> CommonMemory:
    return CommonMemory(Segment.allocate(size_of(kinds)))


@pytest.fixture(params=["ioctl", "pread"])
def way_to_tell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel picks the pages, or, before Linux 6.7, all are looked at."""
    if request.param == "pread":
        monkeypatch.setattr(common_memory, "_SCAN", 0)
    return str(request.param)


@needs_private_pages
def test_what_is_held_stays_when_memory_is_shown_anew() -> None:
    kinds = [Kind((PAGE // 4,), (1,), torch.float32), Kind((PAGE // 2,), (1,), torch.float32)]
    memory = memory_of(*kinds)
    held, edited = memory.places(kinds)
    held.written.fill_(1.0)
    edited.shown.fill_(2.0)
    memory.show_anew([held.shown])
    held_anew, edited_anew = (memory.again(*pair) for pair in zip((held, edited), kinds, strict=True))
    held.written.fill_(3.0)
    assert (held.shown == 1.0).all()
    assert (held_anew.shown == 3.0).all()
    assert (edited_anew.shown == 2.0).all()  # nobody has published it yet
    assert memory.edits() == [(PAGE, 3 * PAGE)]


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


# -- gradients that share memory ---------------------------------------------------------------------------------------


FLAT = torch.zeros(10)


@pytest.mark.parametrize(
    ("tensors", "shared"),
    [
        ([FLAT[:4], FLAT[4:]], False),
        ([FLAT[:5], FLAT[4:]], True),
        ([FLAT, FLAT], True),
        ([FLAT, FLAT[2:3]], True),
        ([FLAT[8:], FLAT[:2], FLAT[2:8]], False),
        ([FLAT[:8:2], FLAT[6:]], True),
        ([FLAT[:4:2], FLAT[4:]], False),
    ],
)
def test_gradients_that_share_memory(tensors, shared):
    assert gradients.share_memory(tensors) is shared
