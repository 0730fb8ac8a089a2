"""The application's data: what is read, how it is split, and the one line that a bad file gets."""

import numpy as np
import pytest
import torch

from tests.choices import chosen
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import data


def write_csv(folder, rows=6, text=None):
    path = folder / "rows.csv"
    lines = [f"{row}.5,{-row},{row * row},{row % 3}" for row in range(rows)]
    path.write_text(text if text is not None else "\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def write_npz(folder, **arrays):
    np.savez(folder / "rows.npz", **arrays)
    return str(folder / "rows.npz")


def facts_of(examples):
    return len(examples.train), len(examples.test), examples.facts["input_shape"], examples.facts["classes"]


def test_digits_are_those_of_scikit_learn_split_without_losing_a_row(monkeypatch):
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    expected = torch.tensor(np.column_stack([bunch.data / 16, bunch.target]), dtype=torch.float32)
    for _ in range(2):
        examples = data.load(chosen("data=digits"))
        assert facts_of(examples) == (1438, 359, (1, 8, 8), 10)
        inputs, labels = (torch.cat([part.tensors[i] for part in (examples.train, examples.test)]) for i in range(2))
        assert inputs.dtype == torch.float32
        rows = torch.cat([inputs.flatten(1), labels[:, None]], dim=1)
        assert sorted(rows.tolist()) == sorted(expected.tolist())
        monkeypatch.setattr(data.importlib.util, "find_spec", lambda _: None)  # a release that keeps its file elsewhere


def test_the_split_is_drawn_by_its_seed_alone(tmp_path):
    path = write_csv(tmp_path, rows=20)
    torch.manual_seed(1)
    one = data.load(chosen("data=csv", path=path))
    torch.manual_seed(2)
    np.random.seed(3)
    two, other = (data.load(chosen("data=csv", path=path, **seed)) for seed in ({}, {"split_seed": 1}))
    assert torch.equal(one.train.tensors[0], two.train.tensors[0])
    assert not torch.equal(one.train.tensors[0], other.train.tensors[0])


def test_the_order_of_examples_is_drawn_anew_each_epoch_and_is_the_seeds(tmp_path):
    def two_epochs(seed):
        loader = data.load(chosen("data=csv", path=write_csv(tmp_path, rows=20))).train_loader(4, seed, workers=0)
        return [[inputs.tolist() for inputs, _ in loader] for _ in range(2)]

    first, second = two_epochs(seed=5)
    assert first != second
    assert two_epochs(seed=5) == [first, second]
    assert two_epochs(seed=6) != [first, second]


def test_csv_with_a_header_and_with_held_out_rows_of_its_own(tmp_path):
    examples = data.load(chosen("data=csv", path=write_csv(tmp_path), test_fraction=0.5, standardize=False))
    assert facts_of(examples) == (3, 3, (3,), 3)
    inputs = torch.cat([examples.train.tensors[0], examples.test.tensors[0]])
    assert sorted(inputs[:, 0].tolist()) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    (tmp_path / "test").mkdir()
    both = chosen("data=csv", path=write_csv(tmp_path), test_path=write_csv(tmp_path / "test", rows=4))
    assert facts_of(data.load(both))[:2] == (6, 4)


def test_csv_without_a_header_label_first_other_delimiter_and_images(tmp_path):
    path = write_csv(tmp_path, text="1;1;2;3;4\n0;5;6;7;8\n")
    settings = {"label_column": 0, "delimiter": ";", "image_shape": [1, 2, 2], "standardize": False}
    examples = data.load(chosen("data=csv", path=path, test_fraction=0.5, **settings))
    assert examples.facts["input_shape"] == (1, 2, 2)
    images = {int(label): image.tolist() for part in (examples.train, examples.test) for image, label in part}
    assert images == {1: [[[1.0, 2.0], [3.0, 4.0]]], 0: [[[5.0, 6.0], [7.0, 8.0]]]}


def test_standardizing_uses_the_training_rows_and_survives_constant_features(tmp_path):
    path = write_csv(tmp_path, text="".join(f"{row},7,{row % 2}\n" for row in range(10)))
    train = data.load(chosen("data=csv", path=path, test_fraction=0.3)).train.tensors[0]
    torch.testing.assert_close(train[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(train[:, 0].std(correction=0), torch.tensor(1.0))
    assert train[:, 1].tolist() == [0.0] * 7


FOUR = {"image": np.zeros((4, 2)), "digit": [0, 1, 2, 3], "image_test": np.zeros((2, 2)), "digit_test": [4, 0]}


@pytest.mark.parametrize(
    ("arrays", "settings", "facts"),
    [
        ({"x": np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2), "y": np.arange(10) % 3}, {}, (8, 2, (1, 2, 2), 3)),
        ({"x": np.arange(40).reshape(10, 4), "y": np.arange(10) % 3}, {"image_shape": [1, 2, 2]}, (8, 2, (1, 2, 2), 3)),
        (FOUR, {"inputs": "image", "labels": "digit"}, (4, 2, (2,), 5)),  # held-out rows and names of its own
    ],
)
def test_npz(tmp_path, arrays, settings, facts):
    assert facts_of(data.load(chosen("data=npz", path=write_npz(tmp_path, **arrays), **settings))) == facts


CSV = "data=csv"
NPZ = "data=npz"


@pytest.mark.parametrize(
    ("kind", "content", "settings", "message"),
    [
        (CSV, "", {}, r"rows\.csv has no rows of numbers\."),
        (CSV, "a,b\n", {}, r"rows\.csv has no rows of numbers"),
        (CSV, "1\n2\n", {}, r"has 1 column\(s\), with ',' as data\.delimiter"),
        (CSV, "1,2\nx,3\n", {}, r"data\.csv refused its arguments path=.*rows\.csv.*'x'"),
        (CSV, "1,2\n3\n", {}, r"refused its arguments path=.*columns"),
        (CSV, "1 2\n3 4\n", {}, "delimiter=.,., .*could not convert"),
        (CSV, "1,2\n3,4\n", {"label_column": 2}, r"has 2 column\(s\), .* and data\.label_column=2 has to be there"),
        (CSV, "1,0.5\n3,1\n", {}, r"the label of row 0 is 0\.5; class labels are the integers"),
        (CSV, "1,-1\n3,1\n", {}, r"the label of row 0 is -1"),
        (CSV, "1,0\nnan,1\n", {}, r"row 1 has a value that is not finite"),
        (CSV, "1,0\n3,1\n", {"image_shape": [1, 2, 2]}, r"image_shape=\[1, 2, 2\], .* cannot reshape array of size 2"),
        (CSV, "1,0\n", {}, r"has 1 rows; data\.test_fraction=0\.2 holds out 0"),
        *((kind, None, {}, r"refused its arguments path=.*No such file .*rows") for kind in (CSV, NPZ)),
        *((kind, "", {"path": "."}, r"refused its arguments path=.* Is a directory") for kind in (CSV, NPZ)),
        (NPZ, {"a": np.zeros(3)}, {}, r"has no array \['x', 'y'\]; it has a\. Set data\.inputs"),
        (NPZ, {"x": np.zeros((3, 2))}, {}, r"has no array \['y'\]; it has x"),
        (NPZ, {"x": np.zeros((3, 2)), "y": np.zeros(2)}, {}, r"inputs have shape \(3, 2\), labels \(2,\)"),
        (NPZ, {"x": np.zeros(3), "y": np.zeros(3)}, {}, r"\(rows, …\) and \(rows,\) with equal rows are needed"),
        (NPZ, {"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, {}, r"could not convert string to float"),
        (NPZ, {"x": np.zeros((3, 2)), "y": np.array([0, 1, 0.5])}, {}, r"the label of row 2 is 0\.5"),
        (
            NPZ,
            {"x": np.ones((9, 4)), "y": np.zeros(9)},
            {"image_shape": [3]},
            r"=\[3\], .* cannot reshape array of size",
        ),
        # It would run code.
        (NPZ, {"x": np.array([{"a": 1}], dtype=object), "y": np.zeros(1)}, {}, "is not a NumPy archive"),
        (NPZ, "", {}, "is not a NumPy archive"),
        (NPZ, "not an archive", {}, "is not a NumPy archive .*use data=csv"),
        (NPZ, "PK\x03\x04 cut off", {}, "is not a NumPy archive"),
        (NPZ, np.zeros(3), {}, r"numpy\.savez\(file, x=inputs, y=labels\) writes"),
    ],
)
def test_malformed_files(tmp_path, monkeypatch, kind, content, settings, message):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, dict):
        np.savez("rows", **content)
        (tmp_path / "rows.npz").rename("rows.csv")
    elif isinstance(content, np.ndarray):
        with open("rows.csv", "wb") as file:
            np.save(file, content)
    elif content is not None:
        write_csv(tmp_path, text=content)
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        data.load(chosen(kind, **{"path": "rows.csv", **settings}))
    assert "\n" not in str(raised.value)
