"""The files of a checkpoint: what is in them, how they are written and read, and what becomes of them when it fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.forked import in_fork
from tests.support.checkpoints import data_file, same, torch_alone
from torchstrat import Checkpoint, CheckpointManager, consolidate
from torchstrat.checkpoint import disk, files, manifest, numbered, reading, writing
from torchstrat.checkpoint.disk import NewFile
from torchstrat.checkpoint.files import BlockSource, memory_of, read, write_metadata, write_part
from torchstrat.checkpoint.folder import written_whole
from torchstrat.checkpoint.items import Writes
from torchstrat.checkpoint.manifest import NAME, check_file, checked, read_manifest, write_manifest
from torchstrat.checkpoint.pieces import Piece
from torchstrat.checkpoint.reading import INDEX, prepare
from torchstrat.checkpoint.stored import open_checkpoint
from torchstrat.checkpoint.writing import Offer, offers_of, selected, share
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64),
]

Parts = Sequence[Sequence[tuple[Piece, "torch.Tensor | BlockSource"]]]


def write(path: Path, parts: Parts, values: Sequence[tuple[tuple[str | int, ...], Any]] = ()) -> Path:
    with written_whole(path) as folder:
        written = [write_part(folder, n, part, () if n else values) for n, part in enumerate(parts)]
        checks = {name: check for one in written for name, check in one.files.items()}
        checks[INDEX] = write_metadata(folder, written)
        write_manifest(folder, checks, {"servers": {0: "records"}})
    return path


def whole(name: str, tensor: torch.Tensor) -> tuple[Piece, torch.Tensor]:
    return Piece((name,), tuple(tensor.shape)), tensor


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """All of them different, as far as the dtype goes."""
    count = int(torch.Size(shape).numel())
    return torch.arange(1, count + 1).remainder(100).reshape(shape).to(dtype)


def values_of(path: Path, *pieces: Piece) -> list[Any]:
    return read(open_checkpoint(path), [(piece, None) for piece in pieces])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 256)
    monkeypatch.setattr(files, "STEP_BYTES", 64)


# -- there and back ---------------------------------------------------------------------------------------------------


@torch_alone
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_for_torchstrat_and_for_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = [(), (0,), (1,), (7,), (5, 3), (0, 3), (4, 0), (33, 5, 2), (2, 200)]
    tensors = {f"shape {shape}": numbers(shape, dtype) for shape in shapes}
    tensors["turned"] = numbers((6, 9), dtype).T
    path = write(tmp_path / "saved", [[whole(name, tensor) for name, tensor in tensors.items()]])
    found = values_of(path, *(Piece((name,), tuple(tensor.shape)) for name, tensor in tensors.items()))
    of_torch = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(of_torch, checkpoint_id=path, no_dist=True)
    described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["shape (33, 5, 2)"]
    rows_of_a_block = 256 // (10 * dtype.itemsize)
    assert len(described.chunks) == (-(-33 // rows_of_a_block) if 330 * dtype.itemsize > 256 else 1)
    for tensor, ours, theirs in zip(tensors.values(), found, of_torch.values(), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert ours.shape == theirs.shape == tensor.shape
        assert bytes(memory_of(ours)) == bytes(memory_of(theirs.contiguous())) == bytes(memory_of(tensor.contiguous()))


def test_views_that_are_conjugated_or_negated(tmp_path: Path) -> None:
    tensor = torch.complex(numbers((3, 2)), -numbers((3, 2)))
    path = write(tmp_path / "saved", [[whole("conj", tensor.conj()), whole("imag", tensor.conj().imag)]])
    conj, imag = values_of(path, Piece(("conj",), (3, 2)), Piece(("imag",), (3, 2)))
    assert torch.equal(conj, tensor.conj().resolve_conj())
    assert torch.equal(imag, numbers((3, 2)))


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    wanted=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5),
)
def test_any_rows_of_any_cut(rows, cuts, wanted, tmp_path_factory) -> None:
    """Also the same rows twice, and none."""
    table = numbers((rows, 3))
    places = sorted({0, rows, *(cut % rows for cut in cuts)})
    spans = list(itertools.pairwise(places))
    parts = [[(Piece(("t",), (rows, 3), first), table[first:stop])] for first, stop in spans]
    path = write(tmp_path_factory.mktemp("cut") / "saved", parts)
    asked = [(min(a, b, rows), min(max(a, b), rows)) for a, b in wanted]
    found = read(open_checkpoint(path), [(Piece(("t",), (rows, 3), a), b - a) for a, b in asked])
    for (first, stop), got in zip(asked, found, strict=True):
        assert torch.equal(got, table[first:stop])


class Lazy:
    """Gives rows out of one buffer that the next rows overwrite; notes what was asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._tensor = tensor
        self._buffer = torch.empty(64 << 10, dtype=tensor.dtype)
        self.asked: list[tuple[int, int]] = []

    def rows(self, first: int, stop: int) -> torch.Tensor:
        self.asked.append((first, stop))
        if not self.shape:
            return self._tensor
        wanted = self._tensor[first:stop]
        self._buffer.fill_(-1)
        return self._buffer[: wanted.numel()].reshape(wanted.shape).copy_(wanted)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(), (0, 3), (50, 3), (5, 40)])
def test_rows_that_come_one_after_another(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = numbers(shape)
    lazy = Lazy(tensor)
    path = write(tmp_path / "lazy", [[(Piece(("t",), shape), lazy), whole("other", torch.ones(3))]])
    assert torch.equal(values_of(path, Piece(("t",), shape))[0], tensor)
    rows = shape[0] if shape else 1
    assert [row for first, stop in lazy.asked for row in range(first, stop)] == list(range(rows))
    bytes_of_row = tensor.nbytes // max(1, rows)
    assert all((stop - first) * bytes_of_row <= max(64, bytes_of_row) for first, stop in lazy.asked)
    assert (path / "__0_0.distcp").read_bytes() == (
        write(tmp_path / "whole", [[whole("t", tensor), whole("other", torch.ones(3))]]) / "__0_0.distcp"
    ).read_bytes()


def test_what_a_source_raises_is_raised(tmp_path: Path) -> None:
    class Lost(Lazy):
        def rows(self, first: int, stop: int) -> torch.Tensor:
            raise ConnectionError("the rows are gone")

    with pytest.raises(ConnectionError, match=r"^the rows are gone$"):
        write(tmp_path / "saved", [[(Piece(("t",), (3,)), Lost(torch.ones(3)))]])
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_blocks")
def test_one_file_for_each_part_and_none_for_nothing(tmp_path: Path) -> None:
    table = numbers((40, 3))
    parts = [[(Piece(("t",), (40, 3)), table[:10])], [], [(Piece(("t",), (40, 3), 10), table[10:])]]
    path = write(tmp_path / "saved", parts, [(("step",), 7)])
    assert sorted(os.listdir(path)) == [INDEX, "__0_0.distcp", "__2_0.distcp", NAME]
    assert values_of(path, Piece(("step",), ()))[0] == 7


def test_parts_that_do_not_add_up(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="does not add up to whole tensors"):
        write(tmp_path / "saved", [[(Piece(("t",), (4,)), torch.ones(2))], [whole("u", torch.ones(1))]])
    assert os.listdir(tmp_path) == []


# -- first checked, then taken ----------------------------------------------------------------------------------------


@torch_alone
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("writer", ["torchstrat", "torch"])
def test_what_is_prepared_is_checked_and_goes_into_what_is_there(writer: str, tmp_path: Path) -> None:
    path, table, number = tmp_path / "saved", numbers((40, 3)), torch.tensor(5.0)
    if writer == "torch":
        dcp.save({"t": table, "s": number, "step": 7}, checkpoint_id=path, no_dist=True)
    else:
        write(path, [[whole("t", table), whole("s", number)]], [(("step",), 7)])
    wanted = [(Piece(("t",), (40, 3), 10), 20), (Piece(("s",), ()), None), (Piece(("step",), ()), None)]
    prepared = prepare(open_checkpoint(path), wanted)
    shutil.rmtree(path)  # as a later save does that takes its place
    into = torch.zeros(20, 3)
    fits = [prepared.fits(0, like) for like in (into, into[1:], into.double(), torch.zeros(3, 20).T)]
    assert fits == [True, False, False, False]
    found, scalar, step = prepared.take([into, None, None])
    prepared.close()
    assert found is into
    assert torch.equal(into, table[10:30])
    assert (float(scalar), step) == (5.0, 7)


def test_a_disk_that_fails_after_checking(saved: Path) -> None:
    prepared = prepare(open_checkpoint(saved), [(Piece(("t",), (40, 3)), None)])
    os.truncate(saved / "__1_0.distcp", 10)
    with pytest.raises(InvalidArgumentError, match=r"__1_0\.distcp, a part of the checkpoint, cannot be read for t"):
        prepared.take([None])
    prepared.close()


# -- what is read and written, and how much memory it takes -----------------------------------------------------------


STATE = 96 << 20


def counters() -> tuple[int, int]:
    """The most memory so far, and bytes read from files, whether they are in memory already or not.

    Without pages of files, such as libraries: the system takes them back when it likes.
    """
    status = dict(re.findall(r"(VmHWM|RssFile):\s+(\d+)", Path("/proc/self/status").read_text()))
    return 1024 * (int(status["VmHWM"]) - int(status["RssFile"])), int(Path("/proc/self/io").read_text().split()[1])


def costs_of(path: Path, call: str) -> str:
    """What writing or reading takes beyond what is there before, as parts of the state; in a process of its own."""
    table = torch.ones(STATE // 4) if call == "write" else None
    into = torch.zeros(STATE // 4) if call == "read into" else None
    write(path.with_name("small"), [[whole("t", torch.ones(3))]])  # what is imported and made once
    values_of(path.with_name("small"), Piece(("t",), (3,)))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    before = counters()
    if table is not None:
        write(path, [[whole("t", table)]])
    elif call == "read":
        values_of(path, Piece(("t",), (STATE // 4,)))
    else:
        prepared = prepare(open_checkpoint(path), [(Piece(("t",), (STATE // 4,)), None)])
        prepared.take([into])
        prepared.close()
    return " ".join(str((now - then) / STATE) for now, then in zip(counters(), before, strict=True))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts with Linux's /proc")
def test_memory_and_bytes_that_are_read(tmp_path: Path) -> None:
    costs = {}
    for call in ("write", "read", "read into"):
        outcome = in_fork(60, lambda: False, costs_of, tmp_path / "saved", call)
        assert outcome.how == "returned", outcome
        costs[call] = [float(one) for one in outcome.text.split()]
    assert costs["write"][0] <= 0.15, costs
    assert costs["read into"][0] <= 0.15, costs
    assert 0.9 <= costs["read"][0] <= 1.15, costs
    assert costs["write"][1] < 0.1, costs
    assert 1.0 <= costs["read"][1] < 1.1, costs


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_plain_file_is_made_of_one_tensor_at_a_time(suffix, tmp_path, monkeypatch) -> None:
    tensors = {f"t{number}": torch.randn(50, 3) for number in range(4)}
    Checkpoint(**tensors).save(tmp_path / "saved")
    read, asked = reading.StoredFolder.read, []

    def counted(self: Any, wanted: Any) -> Any:
        asked.append([piece.key for piece, _ in wanted])
        return read(self, wanted)

    monkeypatch.setattr(reading.StoredFolder, "read", counted)
    consolidate(tmp_path / "saved", tmp_path / f"out.{suffix}")
    assert sorted(keys for keys in asked if keys) == [[name] for name in tensors]


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, small_blocks: None) -> Path:
    table = numbers((40, 3))
    parts = [[(Piece(("t",), (40, 3)), table[:30])], [(Piece(("t",), (40, 3), 30), table[30:])]]
    return write(tmp_path / "saved", parts, [(("step",), {"count": 7})])


def everything(path: Path) -> list[Any]:
    return values_of(path, Piece(("t",), (40, 3)), Piece(("step",), ()))


@pytest.mark.parametrize(
    ("damaged", "places", "message"),
    [
        (
            lambda content, place: content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :],
            40,
            r"{name}.*(is damaged|format)|format \d",
        ),
        (lambda content, place: content[:place], 10, "{name} is damaged"),
    ],
    ids=["a changed byte", "cut off"],
)
def test_damage_anywhere_is_refused_and_the_file_named(damaged, places, message, saved) -> None:
    for name in sorted(os.listdir(saved)):
        content = (saved / name).read_bytes()
        for place in range(0, len(content), max(1, len(content) // places)):
            (saved / name).write_bytes(damaged(content, place))
            with pytest.raises(InvalidArgumentError, match=message.replace("{name}", name)):
                everything(saved)
        (saved / name).write_bytes(content)
    assert everything(saved)[1] == {"count": 7}


def test_damage_names_the_tensor_or_the_value(saved: Path) -> None:
    check = read_manifest(saved)["files"]["__0_0.distcp"]  # type: ignore[index]
    content = (saved / "__0_0.distcp").read_bytes()
    for place, name in ((10, "step"), (len(content) - check.entries[-1].bytes // 2, "t")):
        (saved / "__0_0.distcp").write_bytes(content[:place] + b"\xff\x00" + content[place + 2 :])
        with pytest.raises(InvalidArgumentError, match=rf"__0_0\.distcp is damaged.*, at {name} \(CRC-32"):
            everything(saved)


def test_damage_elsewhere_does_not_stand_in_the_way(saved: Path) -> None:
    """Whoever reads a part checks that part. All of it is what `check_file` is for."""
    file = saved / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100] + b"\xff" + content[-99:])
    first, _ = values_of(saved, Piece(("step",), ()), Piece(("step",), ()))
    assert first == {"count": 7}
    [rows] = read(open_checkpoint(saved), [(Piece(("t",), (40, 3)), 20)])
    assert torch.equal(rows, numbers((40, 3))[:20])
    with pytest.raises(InvalidArgumentError, match=r"__1_0\.distcp is damaged"):
        read(open_checkpoint(saved), [(Piece(("t",), (40, 3), 35), 5)])
    with pytest.raises(InvalidArgumentError, match=r"__1_0\.distcp is damaged"):
        check_file(file, read_manifest(saved)["files"][file.name])  # type: ignore[index]


class Passing:
    """Of a program that is changed between saving and restoring."""


def test_a_value_of_a_class_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "saved", [[whole("t", torch.ones(1))]], [(("own",), Passing())])
    monkeypatch.delattr(sys.modules[__name__], "Passing")
    with pytest.raises(InvalidArgumentError, match=r"own in .*__0_0\.distcp cannot be unpickled by this program: Attr"):
        values_of(path, Piece(("own",), ()))


# -- what others have written -----------------------------------------------------------------------------------------


@torch_alone
def test_format_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one"
    dcp.save({"t": numbers((4, 2))}, checkpoint_id=path, no_dist=True)
    file = data_file(path)
    checks = {name: {"bytes": c.bytes, "crc32": c.crc32} for name in os.listdir(path) for c in [checked(path / name)]}
    (path / NAME).write_text(json.dumps({"format": 1, "torch": "2.9.0", "files": checks}))
    assert torch.equal(values_of(path, Piece(("t",), (4, 2)))[0], numbers((4, 2)))
    content = file.read_bytes()
    file.write_bytes(content[:600] + b"\xfe" + content[601:])
    with pytest.raises(InvalidArgumentError, match=r"\.distcp is damaged: its contents are not what was written"):
        values_of(path, Piece(("t",), (4, 2)))


def test_another_order_of_bytes_is_left_to_torch(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader turns them round."""
    monkeypatch.setattr("torchstrat.checkpoint.stored.StoredFolder", None)  # it would take them as they are
    content = json.loads((saved / NAME).read_text())
    del content["crc32"]
    content["byteorder"] = "another"
    (saved / NAME).write_text(json.dumps({**content, "crc32": manifest._checksum(content)}))
    assert same(everything(saved), [numbers((40, 3)), {"count": 7}])


def test_a_dtype_of_a_later_torch(saved: Path) -> None:
    content = json.loads((saved / NAME).read_text().replace('"float32"', '"float7"'))
    del content["crc32"]
    (saved / NAME).write_text(json.dumps({**content, "crc32": manifest._checksum(content)}))
    with pytest.raises(InvalidArgumentError, match=r"of dtype float7, which torch .* does not have"):
        everything(saved)


def test_a_link_to_a_checkpoint_is_replaced_and_what_it_names_stays(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved)
    write(tmp_path / "latest", [[whole("t", torch.ones(1))]])
    assert not (tmp_path / "latest").is_symlink()
    assert everything(saved)[1] == {"count": 7}
    assert sorted(os.listdir(tmp_path)) == ["latest", "saved"]


# -- disks that do not take it ----------------------------------------------------------------------------------------


def is_intact(path: Path, count: int) -> bool:
    """Whether it is the checkpoint of so many ones still."""
    table = torch.zeros(count)
    Checkpoint(table=table).restore(path)
    return bool(table.all())


def test_a_file_that_may_not_get_so_long(tmp_path: Path) -> None:
    Checkpoint(table=torch.ones(1000)).save(tmp_path / "saved")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        Checkpoint(table=torch.ones(50_000)).save(tmp_path / "saved")

    outcome = in_fork(60, lambda: False, limited)
    assert outcome.how == "raised"
    assert "InvalidArgumentError" in outcome.text
    assert "File too large, while writing rows 0 to 50000 of table" in outcome.text
    assert is_intact(tmp_path / "saved", 1000)
    assert os.listdir(tmp_path) == ["saved"]


def failing(*_: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def second_rename(path: Path, new: Path, rename: Callable[[Path, Path], None] = disk.rename) -> None:
    """The first has then put the old one aside, and it has to be taken back."""
    failing() if ".writing-" in path.name else rename(path, new)


STEPS: dict[str, tuple[Any, str, Any]] = {
    "sync": (NewFile, "sync", failing),
    "metadata": (files, "NewFile", failing),
    "first rename": (disk, "rename", failing),
    "second rename": (disk, "rename", second_rename),
    **{name: (disk, name, failing) for name in ("sync_folder", "make_folder")},
}


@pytest.mark.parametrize("step", STEPS)
def test_an_error_of_the_disk_at_any_step_leaves_the_old_one(step, tmp_path, monkeypatch) -> None:
    Checkpoint(table=torch.ones(3)).save(tmp_path / "saved")
    with monkeypatch.context() as patched:
        patched.setattr(*STEPS[step])
        if "rename" in step:
            patched.setattr(disk, "exchange", lambda one, other: False)
        with pytest.raises(InvalidArgumentError, match=r"(?=.*saved)(?=.*Input/output error)"):
            Checkpoint(table=torch.zeros(3)).save(tmp_path / "saved")
    assert is_intact(tmp_path / "saved", 3)
    assert os.listdir(tmp_path) == ["saved"]


# -- saves that wait for each other ----------------------------------------------------------------------------------


def test_a_save_whose_thread_has_not_begun_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the thread that has asked for it."""
    checkpoint = Checkpoint(table=torch.ones(3))
    late: list[threading.Thread] = []
    with monkeypatch.context() as patched:
        patched.setattr(writing, "TURN_TIMEOUT", timedelta(milliseconds=50))
        patched.setattr(threading.Thread, "start", lambda thread: late.append(thread))
        handle = checkpoint.save(tmp_path / "first", asynchronous=True)
        for call in (checkpoint.save, checkpoint.restore):
            with pytest.raises(CommunicationTimeoutError, match=r"second waited 0.05 s for saving .*first, which is"):
                call(tmp_path / "second")
    late[0].start()
    handle.result(60)
    checkpoint.save(tmp_path / "second")


# -- what is left over ------------------------------------------------------------------------------------------------


def test_what_a_killed_save_has_left_is_swept_away_and_one_under_way_is_not(tmp_path: Path) -> None:
    left = tmp_path / f".saved.writing-{'a' * 32}"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / f".saved-too.writing-{'a' * 32}").mkdir()
    with written_whole(tmp_path / "saved") as first:
        with contextlib.suppress(KeyboardInterrupt), written_whole(tmp_path / "saved"):
            assert first.exists()
            raise KeyboardInterrupt
        assert sorted(os.listdir(tmp_path)) == [f".saved-too.writing-{'a' * 32}", first.name]


def test_a_launcher_that_was_told_marks_what_has_ended(tmp_path: Path) -> None:
    def job(name: str, *steps: int, is_finished: bool = True) -> None:
        with CheckpointManager(tmp_path / name) as manager:
            manager.claim()
            for step in steps:
                manager.save(Checkpoint(weight=torch.zeros(3)), step)
            manager.close(finished=is_finished)

    with numbered.told_directories() as mark:
        job("a", 3, is_finished=False)
        job("b", 4)
        assert numbered.last_step(tmp_path / "a") is None
        job("empty", is_finished=False)
        odd = ("with a\nline break", os.fsdecode(b"caf\xe9"))
        for name in odd:
            job(name, 6, is_finished=False)
        job("replaced", 7, is_finished=False)
        (tmp_path / "replaced").rename(tmp_path / "elsewhere")
        (tmp_path / "replaced").write_text("no folder")
        mark()
    assert [numbered.last_step(tmp_path / name) for name in ("a", "b", "empty", *odd)] == [3, 4, None, 6, 6]
    with pytest.raises(InvalidArgumentError, match=r"the end of training cannot be marked in .*replaced"):
        numbered.mark_finished(tmp_path / "replaced", 7)
    job("a", 5, is_finished=False)  # nobody wants to know
    assert numbered.last_step(tmp_path / "a") is None


# -- what it takes to import ------------------------------------------------------------------------------------------


PROGRAM = """
import sys
from pathlib import Path
import torch
from torchstrat.checkpoint.files import read, write_part
from torchstrat.checkpoint.pieces import Piece
from torchstrat.checkpoint.stored import open_checkpoint

folder = Path(sys.argv[1])
write_part(folder, 1, [(Piece(("t",), (3,)), torch.ones(3))])
assert read(open_checkpoint(folder), [(Piece(("t",), (3,)), None)])[0].tolist() == [7.0, 7.0, 7.0]
assert "torch.distributed.checkpoint" not in sys.modules
"""


def test_parameter_servers_do_without_torchs_checkpoints(tmp_path: Path) -> None:
    """Its import takes seconds and 50 MB, in each of them."""
    write(tmp_path / "saved", [[whole("t", torch.full((3,), 7.0))]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- who writes what: every value once, the bytes spread evenly, and only by those that hold it and see the folder -----


MIB = 1 << 20


def offer(name: str, size: int = 0, start: int = 0) -> Offer:
    return Offer((("model", name), start), ("torch.float32", (2,), (2,)), size, shared=size > 0)


@given(
    sizes=st.lists(st.sampled_from([0, MIB, 3 * MIB, 10 * MIB]), max_size=12),
    held=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4),
    sees=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_each_is_written_once_by_one_that_can(sizes: list[int], held: list[list[bool]], sees: list[bool]) -> None:
    ranks = len(held)
    offers = [[offer(str(n), size) for n, size in enumerate(sizes) if held[rank][n]] for rank in range(ranks)]
    able = [{one.place for one in of_rank} if sees[rank] else set() for rank, of_rank in enumerate(offers)]
    places = {one.place for of_rank in offers for one in of_rank}
    if places - set().union(*able):
        with pytest.raises(InvalidArgumentError, match=r"is held by rank \d alone, which does not see /shared"):
            share(offers, sees[:ranks], "/shared")
        return
    written = share(offers, sees[:ranks], "/shared")
    assert sum(map(len, written)) == len(places)
    assert set().union(*written) == places
    assert all(mine <= can for mine, can in zip(written, able, strict=True))
    for place in places:  # what is not to be shared: by the first
        if not next(one for of_rank in offers for one in of_rank if one.place == place).shared:
            assert place in written[next(rank for rank in range(ranks) if place in able[rank])]


def test_what_may_differ_stays_together() -> None:
    """Large buffers, too: two ranks' running statistics are not to be mixed."""
    piece, buffer, small = (Piece(("model", name), (MIB,)) for name in ("weight", "buffer", "bias"))
    tensors = [(piece, torch.zeros(MIB)), (buffer, torch.zeros(MIB)), (small, torch.zeros(2))]
    writes = Writes(tensors, [(("model", "note"), "x")], frozenset({piece.path, small.path}))
    offers = offers_of(writes)
    assert [one.shared for one in offers] == [True, False, False, False]
    first, second = (selected(writes, mine) for mine in share([offers, offers], [True, True], ""))
    assert [one.path for one, _ in first.tensors] == [buffer.path, small.path]
    assert len(first.values) == 1
    assert [one.path for one, _ in second.tensors] == [piece.path]
    assert not second.values


def test_shards_of_one_tensor_are_different_things() -> None:
    offers = [[offer("table", MIB, start=0)], [offer("table", MIB, start=2)]]
    assert share(offers, [True, True], "") == [{(("model", "table"), 0)}, {(("model", "table"), 2)}]


def test_one_name_of_different_things() -> None:
    other = Offer((("model", "a"), 0), ("torch.float64", (2,), (2,)), 0, shared=False)
    with pytest.raises(InvalidArgumentError, match=r"model\.a is torch\.float32.* rank 0 and torch\.float64.* rank 1"):
        share([[offer("a")], [other]], [True, True], "")
