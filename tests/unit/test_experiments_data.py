"""The application's data: what is read, how it is split, and the one line that a bad file gets."""

import numpy as np
import pytest
import torch

from tests.choices import chosen
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import data


def test_digits_are_images_split_without_losing_a_row():
    pytest.importorskip("sklearn")
    examples = data.load(chosen("data=digits"))
    assert (len(examples.train), len(examples.test)) == (1438, 359)
    assert examples.facts["input_shape"] == (1, 8, 8)
    assert examples.facts["classes"] == 10
    assert examples.train.tensors[0].dtype == torch.float32
    assert 0.0 <= float(examples.train.tensors[0].min()) < float(examples.train.tensors[0].max()) <= 1.0


def test_digits_are_those_of_scikit_learn(monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    expected = np.column_stack([bunch.data, bunch.target])
    assert np.array_equal(data._digits_table(), expected)
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda _: None)  # a release that keeps its file elsewhere
    assert np.array_equal(data._digits_table(), expected)


def test_the_split_is_drawn_by_its_seed_alone(tmp_path):
    path = write_csv(tmp_path, rows=20)
    torch.manual_seed(1)
    one = data.load(chosen("data=csv", path=path))
    torch.manual_seed(2)
    np.random.seed(3)
    two = data.load(chosen("data=csv", path=path))
    other = data.load(chosen("data=csv", path=path, split_seed=1))
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


def write_csv(folder, rows=6, text=None):
    path = folder / "rows.csv"
    lines = [f"{row}.5,{-row},{row * row},{row % 3}" for row in range(rows)]
    path.write_text(text if text is not None else "\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def test_csv_with_a_header(tmp_path):
    examples = data.load(chosen("data=csv", path=write_csv(tmp_path), test_fraction=0.5, standardize=False))
    assert (len(examples.train), len(examples.test), examples.facts["input_shape"], examples.facts["classes"]) == (
        3,
        3,
        (3,),
        3,
    )
    inputs = torch.cat([examples.train.tensors[0], examples.test.tensors[0]])
    assert sorted(inputs[:, 0].tolist()) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


def test_csv_without_a_header_label_first_other_delimiter_and_images(tmp_path):
    path = write_csv(tmp_path, text="1;1;2;3;4\n0;5;6;7;8\n")
    config = chosen(
        "data=csv",
        path=path,
        label_column=0,
        delimiter=";",
        image_shape=[1, 2, 2],
        test_fraction=0.5,
        standardize=False,
    )
    examples = data.load(config)
    assert examples.facts["input_shape"] == (1, 2, 2)
    images = {int(label): image for part in (examples.train, examples.test) for image, label in part}
    assert images[1].tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    assert images[0].tolist() == [[[5.0, 6.0], [7.0, 8.0]]]


def test_standardizing_uses_the_training_rows_and_survives_constant_features(tmp_path):
    path = write_csv(tmp_path, text="".join(f"{row},7,{row % 2}\n" for row in range(10)))
    examples = data.load(chosen("data=csv", path=path, test_fraction=0.3))
    train = examples.train.tensors[0]
    torch.testing.assert_close(train[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(train[:, 0].std(correction=0), torch.tensor(1.0))
    assert train[:, 1].tolist() == [0.0] * 7


def test_csv_with_held_out_rows_of_its_own(tmp_path):
    (tmp_path / "test").mkdir()
    config = chosen("data=csv", path=write_csv(tmp_path), test_path=write_csv(tmp_path / "test", rows=4))
    examples = data.load(config)
    assert (len(examples.train), len(examples.test)) == (6, 4)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("", {}, r"rows\.csv has no rows of numbers\."),
        ("a,b\n", {}, r"rows\.csv has no rows of numbers"),
        ("1\n2\n", {}, r"has 1 column\(s\), with ',' as data\.delimiter"),
        ("1,2\nx,3\n", {}, r"data\.csv refused its arguments path=.*rows\.csv.*'x'"),
        ("1,2\n3\n", {}, r"refused its arguments path=.*columns"),
        ("1 2\n3 4\n", {}, "delimiter=.,., .*could not convert"),
        ("1,2\n3,4\n", {"label_column": 2}, r"has 2 column\(s\), .* and data\.label_column=2 has to be there"),
        ("1,0.5\n3,1\n", {}, r"the label of row 0 is 0\.5; class labels are the integers"),
        ("1,-1\n3,1\n", {}, r"the label of row 0 is -1"),
        ("1,0\nnan,1\n", {}, r"row 1 has a value that is not finite"),
        ("1,0\n3,1\n", {"image_shape": [1, 2, 2]}, r"image_shape=\[1, 2, 2\], .* cannot reshape array of size 2"),
        ("1,0\n", {}, r"has 1 rows; data\.test_fraction=0\.2 holds out 0"),
    ],
)
def test_malformed_csv(tmp_path, text, settings, message):
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        data.load(chosen("data=csv", path=write_csv(tmp_path, text=text), **settings))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["data=csv", "data=npz"])
def test_a_missing_file_is_named_with_its_setting(tmp_path, kind):
    with pytest.raises(InvalidArgumentError, match=r"refused its arguments path=.*No such file .*absent"):
        data.load(chosen(kind, path=str(tmp_path / "absent")))
    with pytest.raises(InvalidArgumentError, match=r"refused its arguments path=.* Is a directory"):
        data.load(chosen(kind, path=str(tmp_path)))


def write_npz(folder, **arrays):
    path = folder / "rows.npz"
    np.savez(path, **arrays)
    return str(path)


def test_npz(tmp_path):
    path = write_npz(tmp_path, x=np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2), y=np.arange(10) % 3)
    examples = data.load(chosen("data=npz", path=path))
    assert (len(examples.train), len(examples.test), examples.facts["input_shape"], examples.facts["classes"]) == (
        8,
        2,
        (1, 2, 2),
        3,
    )


def test_flat_rows_of_an_archive_as_images(tmp_path):
    arrays = {"x": np.arange(40).reshape(10, 4), "y": np.arange(10) % 3}
    examples = data.load(chosen("data=npz", path=write_npz(tmp_path, **arrays), image_shape=[1, 2, 2]))
    assert examples.facts["input_shape"] == (1, 2, 2)
    with pytest.raises(InvalidArgumentError, match=r"image_shape=\[1, 3, 2\], .* cannot reshape array of size 40"):
        data.load(chosen("data=npz", path=write_npz(tmp_path, **arrays), image_shape=[1, 3, 2]))


def test_npz_with_held_out_rows_and_names_of_its_own(tmp_path):
    images = np.zeros((4, 2), dtype=np.float64)
    path = write_npz(tmp_path, image=images, digit=[0, 1, 2, 3], image_test=images[:2], digit_test=[4, 0])
    examples = data.load(chosen("data=npz", path=path, inputs="image", labels="digit"))
    assert (len(examples.train), len(examples.test), examples.facts["classes"]) == (4, 2, 5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, r"has no array \['x', 'y'\]; it has a\. Set data\.inputs"),
        ({"x": np.zeros((3, 2))}, r"has no array \['y'\]; it has x"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, r"inputs have shape \(3, 2\), labels \(2,\)"),
        ({"x": np.zeros(3), "y": np.zeros(3)}, r"\(rows, …\) and \(rows,\) with equal rows are needed"),
        ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, r"could not convert string to float"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, 0.5])}, r"the label of row 2 is 0\.5"),
    ],
)
def test_npz_with_the_wrong_arrays(tmp_path, arrays, message):
    with pytest.raises(InvalidArgumentError, match=message):
        data.load(chosen("data=npz", path=write_npz(tmp_path, **arrays)))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_archive(tmp_path, content):
    (tmp_path / "rows.npz").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="is not a NumPy archive"):
        data.load(chosen("data=npz", path=str(tmp_path / "rows.npz")))


def test_other_files_are_told_from_archives(tmp_path):
    with pytest.raises(InvalidArgumentError, match="use data=csv"):
        data.load(chosen("data=npz", path=write_csv(tmp_path)))
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InvalidArgumentError, match=r"numpy\.savez\(file, x=inputs, y=labels\) writes"):
        data.load(chosen("data=npz", path=str(tmp_path / "one.npy")))


def test_an_archive_that_would_run_code_is_refused(tmp_path):
    path = write_npz(tmp_path, x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(InvalidArgumentError, match="is not a NumPy archive"):
        data.load(chosen("data=npz", path=path))
