"""scripts/examples/clicks: what a line of a log means, the model's formula, and that the configuration is composed."""

import importlib

import numpy as np
import pytest
import torch

from tests.support.programs import ROOT


@pytest.fixture
def logs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "examples" / "clicks"))
    return importlib.import_module("clicks.logs")


def line(label="0", integers=("7",) * 13, categories=("ff",) * 26) -> str:
    return "\t".join([label, *integers, *categories])


def test_rows_of_a_log_and_the_last_are_held_out(logs, tmp_path):
    file = tmp_path / "log.tsv"
    file.write_text(f"{line()}\n{line('1', ['', '-2', *['0'] * 11])}\r\n{line()}\n{line(categories=[''] * 26)}\n")
    train, test = logs.read(str(file), category_rows=1000, test_fraction=0.25)
    assert (len(train), len(test)) == (3, 1)
    (counts, table_rows), label = train[1]
    assert counts.tolist() == pytest.approx([0.0, -np.log(3), *[0.0] * 11])
    assert label == 1.0
    assert torch.equal(train[0][0][1], table_rows)
    assert (test[0][0][1] != table_rows).any(), "missing is a category of its own"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("click\tuser", r"log\.tsv, line 2: 2 field\(s\), and 40 with tabs between them"),
        (line("2"), "line 2: '2' is not in list; a label 0 or 1"),
        (line(integers=["x", *["0"] * 12]), "line 2: invalid literal .*'x'; a label 0 or 1, 13 whole"),
        (line(categories=["xyz", *["0"] * 25]), "line 2: invalid literal .*'xyz'"),
    ],
)
def test_a_malformed_line_is_named(logs, tmp_path, text, message):
    file = tmp_path / "log.tsv"
    file.write_text(f"{line()}\n{text}\n")
    with pytest.raises(ValueError, match=message):
        logs.read(str(file))


def test_a_number_in_two_fields_is_two_categories(logs):
    rows = logs.hash_categories(np.full((1, 26), 5, dtype=np.uint64), 1 << 20)
    assert len(set(rows[0].tolist())) == 26
    assert ((rows >= 0) & (rows < 1 << 20)).all()


def test_the_same_seed_draws_the_same_clicks(logs):
    first, again, other = (logs.synthetic(rows=50, seed=seed)[0] for seed in (1, 1, 2))
    assert (len(first), torch.equal(first[3][0][1], again[3][0][1])) == (40, True)
    assert not torch.equal(first[3][0][1], other[3][0][1])


def test_logits_are_those_of_the_formula(logs):
    torch.manual_seed(0)
    model = importlib.import_module("clicks.model").WideAndDeep(20, embedding_width=3, hidden=[8])
    torch.nn.init.normal_(model.wide_categories.weight)
    integers, table_rows = torch.rand(4, 13), torch.randint(20, (4, 26))
    with torch.no_grad():
        wide = model.wide_categories.weight[table_rows].sum(dim=(1, 2)) + model.wide_integers(integers)[:, 0]
        deep = model.deep(torch.cat([integers, model.embedding.weight[table_rows].flatten(1)], dim=1))[:, 0]
        torch.testing.assert_close(model((integers, table_rows)), wide + deep)
