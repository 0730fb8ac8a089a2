"""The parts of ``./scripts/coverage`` and ``./scripts/mutants`` that start a pytest of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("cosmic_ray", reason="needs pip install -e .[mutants], as ./scripts/mutants does")

from scripts.measuring.coverings import Covering, Coverings
from scripts.measuring.drawing import draw
from scripts.measuring.parts import ROOT, part_of
from scripts.measuring.pytest_run import PytestRun, copy_of
from scripts.measuring.trials import KILLED, SURVIVED, Trials

TOY = """\
def larger(a, b):
    return b if b > a else a


def unused(a):
    return a + 1
"""
TESTS = """\
import toy


def test_larger():
    assert toy.larger(1, 2) == 2


def test_something_else():
    assert toy
"""


def test_a_toy_test_kills_the_mutants_that_it_can_tell(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TESTS)
    with copy_of(tmp_path) as tree:
        trials = Trials(tree, PytestRun(tree, 60.0), {}, 60.0)

        def outcome(mutated, test="test_larger"):
            assert mutated != TOY
            return trials.try_out("toy.py", mutated, Covering(frozenset([f"test_toy.py::{test}"]), frozenset()))

        killed = outcome(TOY.replace("b > a", "b < a"))
        assert (killed.outcome, killed.by) == (KILLED, "test_toy.py::test_larger")
        assert outcome(TOY.replace("b > a", "b >= a")).outcome == SURVIVED  # the same numbers
        assert outcome(TOY.replace("b > a", "b < a"), "test_something_else").outcome == SURVIVED
        assert outcome("raise ImportError").outcome == KILLED
    assert (tmp_path / "toy.py").read_text() == TOY


def test_lines_of_other_processes_are_put_down_to_the_test_that_asked_for_them(tmp_path):
    test = "tests/multiprocess/test_variable.py::test_copies_that_differ_and_errors"
    part = part_of([test], tmp_path)
    assert part.run() == 0
    assert part.summary is not None
    assert part.summary["processes"] >= 3  # pytest's and two
    coverings = Coverings(tmp_path)
    file = "torchstrat/replicas/per_process/engine.py"  # used in processes of a group alone
    everywhere = set(range(len((ROOT / file).read_text().splitlines())))
    assert coverings.of(file, everywhere).certain == {test}
    assert coverings.sources.keys() >= {file}


def test_a_drawing_of_the_package_has_a_mutant_of_each_line_that_compiles():
    files = ["torchstrat/core/nest.py", "torchstrat/core/reachable.py"]
    mutants = draw(ROOT, files, seed=0, count=5, weights={})
    assert len({mutant.place for mutant in mutants}) == 5
