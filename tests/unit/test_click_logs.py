"""Click logs: what a line means, rows by number out of byte ranges, and the synthetic log."""

import io
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.choices import chosen
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import click_logs, click_rows, data, synthetic_clicks
from torchstrat.experiments.click_logs import ClickLog, NearbyOrder
from torchstrat.experiments.click_rows import MISSING_CATEGORY, CollateClicks, hash_categories, parse


def line(label="0", integers=None, categories=None) -> str:
    integers = [str(number) for number in range(13)] if integers is None else integers
    categories = [f"{number:08x}" for number in range(26)] if categories is None else categories
    return "\t".join([label, *integers, *categories])


class TestLines:
    def test_fields(self):
        row = parse(line("1", [*map(str, range(12)), "-2"], ["ffffffff", "A"] + ["0"] * 24).encode())
        assert row.clicked is True
        assert row.integers == (*range(12), -2)
        assert row.categories == (0xFFFFFFFF, 10, *[0] * 24)

    def test_empty_fields_are_missing_values(self):
        row = parse(line(integers=[""] * 13, categories=[""] * 26).encode())
        assert row == (False, (0.0,) * 13, (MISSING_CATEGORY,) * 26)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"1 field\(s\), and 40 with tabs between them are needed"),
            (line().replace("\t", ","), r"1 field\(s\), and 40"),
            (line() + "\t1", r"41 field\(s\), and 40"),
            (line("2"), r"the label is '2', and 1 \(clicked\) or 0 is needed"),
            (line(""), "the label is ''"),
            (line(integers=["1"] * 4 + ["1.5"] + ["1"] * 8), "integer 5 is '1.5', and a whole number or nothing"),
            (line(integers=["-"] * 13), "integer 1 is '-'"),
            (line(integers=["9" * 99] * 13), "integer 1 is '9{40}…'"),
            (line(categories=["0"] * 25 + ["xyz"]), "category 26 is 'xyz', and at most 8 hexadecimal digits"),
            (line(categories=["0_1"] * 26), "category 1 is '0_1'"),
            (line(categories=["123456789"] * 26), "category 1 is '123456789'"),
        ],
    )
    def test_what_is_wrong_is_said(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse(text.encode())


class TestBatches:
    ROWS = (
        parse(line("1", ["7", "-7", *[""] * 11], ["5", "5", *[""] * 24]).encode()),
        parse(line("0", ["1000000", *["0"] * 12], ["5", "6", *[""] * 24]).encode()),
    )

    def test_shapes_and_values(self):
        (integers, table_rows), labels = CollateClicks(1000)(list(self.ROWS))
        assert (integers.dtype, table_rows.dtype, labels.dtype) == (torch.float32, torch.int64, torch.float32)
        assert integers.shape == (2, 13)
        assert table_rows.shape == (2, 26)
        assert labels.tolist() == [1.0, 0.0]
        expected = [[math.log(8), -math.log(8), *[0.0] * 11], [math.log(1_000_001), *[0.0] * 12]]
        torch.testing.assert_close(integers, torch.tensor(expected))

    def test_a_category_keeps_its_row_and_fields_do_not_share_categories(self):
        (_, table_rows), _ = CollateClicks(1 << 40)(list(self.ROWS))  # so many rows that none is hit twice by chance
        one, other = table_rows.tolist()
        assert one[0] == other[0]
        assert one[0] != one[1]
        assert one[1] != other[1]
        assert one[2:] == other[2:]
        assert len(set(one)) == 26

    def test_the_rows_of_the_tables_are_all_used_and_used_alike(self):
        """Consecutive numbers, the worst case for a modulo of a power of two or of a divisor of 2^32."""
        categories = np.arange(26 * 4000, dtype=np.uint64).reshape(4000, 26) << np.uint64(10)
        for rows in (1, 7, 64, 1000):
            counts = np.bincount(hash_categories(categories, rows).ravel(), minlength=rows)
            expected = categories.size / rows
            assert len(counts) == rows
            assert abs(counts - expected).max() < 6 * math.sqrt(expected)  # six deviations of a fair draw

    def test_hashing_is_the_same_in_every_process_and_version(self):
        first = hash_categories(np.zeros((1, 26), dtype=np.uint64), 1 << 16)[0, :3].tolist()
        assert first == [splitmix64(field << 33) % (1 << 16) for field in range(3)]


def splitmix64(seed: int) -> int:
    """The published algorithm in Python's own integers."""
    mask = (1 << 64) - 1
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def write_log(folder: Path, rows: int, end="\n", last_end=True) -> Path:
    """Row ``n`` has ``n`` as its first integer; lines are of very different lengths."""
    lines = [line(str(row % 2), [str(row), *["1" * (row * 7 % 18)] * 12], [""] * 26) for row in range(rows)]
    path = folder / "log.tsv"
    path.write_bytes((end.join(lines) + end * last_end).encode())
    return path


def numbers(log: ClickLog, indices=None) -> list[int]:
    rows = log.__getitems__(list(range(len(log)) if indices is None else indices))
    return [int(row.integers[0]) for row in rows]


@pytest.fixture(params=[4 << 20, 100, 1], ids=lambda size: f"chunks of {size}")
def chunks(request, monkeypatch):
    monkeypatch.setattr(click_logs, "_CHUNK_BYTES", request.param)


class TestRowsByNumber:
    @pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 50])
    @pytest.mark.parametrize("last_end", [True, False])
    def test_all_rows(self, tmp_path, chunks, rows, last_end):
        log = ClickLog(write_log(tmp_path, rows, last_end=last_end))
        assert len(log) == rows
        assert numbers(log) == list(range(rows))

    def test_any_order_and_repetitions(self, tmp_path):
        log = ClickLog(write_log(tmp_path, 100))
        assert numbers(log, [99, 0, 40, 40, 17, 16]) == [99, 0, 40, 40, 17, 16]
        assert int(log[3].integers[0]) == 3

    def test_lines_that_end_as_windows_ends_them(self, tmp_path):
        assert numbers(ClickLog(write_log(tmp_path, 20, end="\r\n"))) == list(range(20))

    @pytest.mark.parametrize("index", [-1, 20])
    def test_a_row_that_is_not_there(self, tmp_path, index):
        with pytest.raises(IndexError, match=f"row {index} of 20"):
            ClickLog(write_log(tmp_path, 20))[index]

    @pytest.mark.parametrize("last_end", [True, False])
    def test_every_cut_of_the_bytes_loses_and_repeats_no_row(self, tmp_path, last_end):
        path = write_log(tmp_path, 6, last_end=last_end)
        for cut in range(path.stat().st_size + 1):
            before, after = ClickLog(path, 0, cut), ClickLog(path, cut)
            assert numbers(before) + numbers(after) == list(range(6)), cut

    @pytest.mark.parametrize("shards", [1, 2, 3, 7, 100])
    def test_shards_are_all_rows_once(self, tmp_path, chunks, shards):
        log = ClickLog(write_log(tmp_path, 40))
        parts = [log.shard(shards, index) for index in range(shards)]
        assert [number for part in parts for number in numbers(part)] == list(range(40))
        if shards <= 3:
            assert all(len(part) >= 40 // shards - 5 for part in parts)

    def test_a_shard_reads_its_own_bytes_only(self, tmp_path):
        """The rest of the file may be anything: a worker neither parses nor even looks at it."""
        path = write_log(tmp_path, 40)
        half = ClickLog(path).shard(2, 1)
        content = bytearray(path.read_bytes())
        mine = half.begin - 1  # the byte before says whether a line begins at the first
        content[:mine] = bytes(mine)
        path.write_bytes(content)
        assert numbers(half)[-1] == 39
        assert len(half) > 15

    def test_it_travels_without_its_index(self, tmp_path):
        log = ClickLog(write_log(tmp_path, 5000))
        before = len(pickle.dumps(log))
        assert before < 1000
        assert numbers(pickle.loads(pickle.dumps(log)), [4999]) == [4999]

    @pytest.mark.parametrize("begin", [0, 300, 301, 302])
    def test_errors_name_file_and_line(self, tmp_path, begin):
        path = write_log(tmp_path, 30)
        lines = path.read_text().splitlines()
        lines[17] = lines[17].replace("\t", " ")
        path.write_text("\n".join(lines))
        log = ClickLog(path, begin)
        with pytest.raises(InvalidArgumentError, match=r"log\.tsv, line 18: 1 field\(s\)"):
            numbers(log)


class TestOrder:
    def test_every_row_once_and_anew_each_pass(self):
        order = NearbyOrder(10_000, torch.Generator().manual_seed(0))
        first, second = list(order), list(order)
        assert len(order) == 10_000
        assert sorted(first) == sorted(second) == list(range(10_000))
        assert first != second
        assert first == list(NearbyOrder(10_000, torch.Generator().manual_seed(0)))

    def test_an_empty_log_has_an_empty_order(self):
        assert list(NearbyOrder(0, torch.Generator())) == []

    def test_a_batch_of_a_large_log_comes_from_a_few_places(self, monkeypatch):
        monkeypatch.setattr(NearbyOrder, "RUN_ROWS", 64)
        monkeypatch.setattr(NearbyOrder, "RUNS_TOGETHER", 4)
        order = list(NearbyOrder(10_000, torch.Generator().manual_seed(0)))
        assert sorted(order) == list(range(10_000))
        batch = order[:256]
        assert len({row // 64 for row in batch}) == 4
        assert max(batch) - min(batch) > 4 * 64  # the four are not neighbours
        assert sorted(batch[:64]) != list(range(min(batch), min(batch) + 64))  # and are mixed


class TestExamples:
    def test_the_end_of_the_log_is_held_out(self, tmp_path):
        path = write_log(tmp_path, 100)
        examples = data.load(chosen("data=click_logs", path=str(path), test_fraction=0.25))
        assert numbers(examples.train) + numbers(examples.test) == list(range(100))
        assert 20 <= len(examples.test) <= 30

    def test_held_out_rows_of_their_own(self, tmp_path):
        (tmp_path / "test").mkdir()
        test_path = write_log(tmp_path / "test", 7)
        examples = data.load(chosen("data=click_logs", path=str(write_log(tmp_path, 10)), test_path=str(test_path)))
        assert (len(examples.train), len(examples.test)) == (10, 7)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_loaders_give_every_row_once(self, tmp_path, workers):
        examples = data.load(chosen("data=click_logs", path=str(write_log(tmp_path, 100)), category_rows=50))
        for loader, log in [
            (examples.train_loader(32, seed=1, workers=workers), examples.train),
            (examples.test_loader(8), examples.test),
        ]:
            batches = list(loader)
            found = torch.cat([integers[:, 0] for (integers, _), _ in batches]).expm1().round().long().tolist()
            assert sorted(found) == numbers(log)
            assert all(int(table_rows.max()) < 50 for (_, table_rows), _ in batches)
            assert len(batches) == len(loader)

    def test_shards_of_the_training_rows(self, tmp_path):
        train = data.load(chosen("data=click_logs", path=str(write_log(tmp_path, 100)))).train
        shards = [train.shard(3, index) for index in range(3)]
        assert [number for shard in shards for number in numbers(shard)] == numbers(train)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", r"data\.path=.*log\.tsv has no rows"),
            ("label\tI1\n", r"log\.tsv, line 1: 2 field\(s\), and 40 with tabs between them are needed"),
            (line("click") + "\n", r"log\.tsv, line 1: the label is 'click'"),
        ],
    )
    def test_another_format_is_noticed_before_anything_starts(self, tmp_path, content, message):
        (tmp_path / "log.tsv").write_text(content)
        with pytest.raises(InvalidArgumentError, match=message):
            data.load(chosen("data=click_logs", path=str(tmp_path / "log.tsv")))

    @pytest.mark.parametrize("setting", ["path", "test_path"])
    def test_a_missing_file_is_named_with_its_setting(self, tmp_path, setting):
        settings = {"path": str(write_log(tmp_path, 3)), setting: str(tmp_path / "absent")}
        with pytest.raises(InvalidArgumentError, match=rf"data\.{setting}=.*absent does not exist"):
            data.load(chosen("data=click_logs", **settings))


class TestSynthetic:
    def written(self, rows=2000, seed=0) -> bytes:
        file = io.BytesIO()
        synthetic_clicks.write(file, rows, seed)
        return file.getvalue()

    def test_every_line_is_of_the_format(self):
        lines = self.written().splitlines()
        rows = [parse(text) for text in lines]
        assert len(rows) == 2000
        assert 0.15 < np.mean([row.clicked for row in rows]) < 0.4
        missing = np.mean([[category == MISSING_CATEGORY for category in row.categories] for row in rows], axis=0)
        assert missing.max() > 0.1
        assert missing.min() == 0.0

    def test_the_seed_decides_and_nothing_else(self):
        torch.manual_seed(1)
        one = self.written()
        np.random.seed(2)
        assert self.written() == one
        assert self.written(seed=1) != one

    def test_categories_are_skewed_as_zipfs_law_says(self):
        categories = np.array([parse(text).categories for text in self.written(rows=5000).splitlines()])
        widest = max(range(26), key=lambda field: len(np.unique(categories[:, field])))
        present = categories[:, widest][categories[:, widest] != MISSING_CATEGORY]
        counts = np.sort(np.unique(present, return_counts=True)[1])[::-1]
        assert len(counts) > 500
        assert counts[0] > 0.05 * len(present)  # the most frequent category
        assert np.median(counts) <= 2  # most occur once or twice
        assert 1.4 < counts[0] / counts[1] < 3.1  # 2^1.1 = 2.1, as far as a sample shows it

    def test_the_file_is_kept_and_called_synthetic(self, tmp_path):
        config = chosen("data=synthetic_clicks", rows=50, seed=3, folder=str(tmp_path / "new" / "folder"))
        examples = data.load(config)
        (path,) = (tmp_path / "new" / "folder").iterdir()
        assert path.name.startswith("synthetic_clicks")
        assert len(examples.train) + len(examples.test) == 50
        before = path.stat().st_mtime_ns
        data.load(config)
        assert path.stat().st_mtime_ns == before
        data.load(chosen("data=synthetic_clicks", rows=50, seed=4, folder=config["folder"]))
        assert len(list(path.parent.iterdir())) == 2

    def test_a_write_that_fails_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(file, rows, seed):
            file.write(b"half a line")
            raise OSError("no space left")

        monkeypatch.setattr(synthetic_clicks, "write", fail)
        with pytest.raises(OSError, match="no space left"):
            data.load(chosen("data=synthetic_clicks", rows=50, folder=str(tmp_path)))
        assert list(tmp_path.iterdir()) == []

    def test_settings_reach_the_log(self, tmp_path):
        config = chosen("data=synthetic_clicks", rows=100, test_fraction=0.5, category_rows=9, folder=str(tmp_path))
        examples = data.load(config)
        assert examples.facts["category_rows"] == 9
        assert 40 <= len(examples.test) <= 60


def test_the_constants_are_those_of_the_format():
    assert (click_rows.INTEGERS, click_rows.CATEGORIES, click_rows.FIELDS) == (13, 26, 40)
