"""How ``./scripts/mutants`` draws, finds lines again, judges and goes on. With a real pytest: tests/launch."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest

pytest.importorskip("cosmic_ray", reason="needs pip install -e .[mutants], as ./scripts/mutants does")

from scripts.measuring.coverings import Covering, test_of
from scripts.measuring.drawing import Mutant, draw, weight_of
from scripts.measuring.mutants import go_on
from scripts.measuring.operators import mutate, mutations
from scripts.measuring.places import lines_to_cover, places
from scripts.measuring.pytest_run import Ended
from scripts.measuring.reports import Report
from scripts.measuring.trials import GONE, KILLED, NOT_COVERED, SURVIVED, TIMED_OUT, Trials, Verdict

test_of.__test__ = False  # its name is not meant for pytest

TOY = textwrap.dedent(
    '''\
    """Numbers: 1 + 1."""
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        LIMITS = 1 + 2

    LIMIT = 3


    def clamp(value: int | None, low: int = 0) -> int | None:
        # no mutants: 1 + 1
        if value is None or value < low:
            return low
        for _ in range(2):
            value = min(
                value,
                LIMIT,
            )
        return value


    class Sum:
        start = 0

        @property
        def twice(self):
            return self.start + self.start
    '''
)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    return tmp_path


def drawn(root, seed=0, count=100, files=("toy.py",), weights=None):
    return draw(root, list(files), seed=seed, count=count, weights=weights or {})


def line_of(text):
    return next(number for number, line in enumerate(TOY.splitlines(), 1) if line.strip() == text)


def test_a_seed_draws_the_same_and_another_seed_others_whatever_is_edited_elsewhere(root):
    first, more = drawn(root, count=2), drawn(root, count=4)
    assert len(first) == 2
    assert drawn(root, count=2) == first
    assert any(drawn(root, seed, count=2) != first for seed in (1, 2, 3))
    (root / "toy.py").write_text('"""Other words."""\nimport os\n\n\ndef other():\n    return None\n\n\n' + TOY)
    assert drawn(root, count=4) == more


def test_every_line_that_does_something_can_be_drawn_and_no_other(root):
    signature = "def clamp(value: int | None, low: int = 0) -> int | None:"
    expected = ["LIMIT = 3", signature, "if value is None or value < low:", "for _ in range(2):"]
    expected += ["start = 0", "@property", "return self.start + self.start"]
    assert sorted(one.place.text for one in drawn(root)) == sorted(expected)
    assert {one.operator for one in mutations(TOY, line_of(signature))} == {"NumberReplacer"}  # no annotations


def test_a_mutant_is_another_program_and_says_what_its_line_becomes(root):
    for mutant in drawn(root):
        line, mutated = mutant.apply(TOY)
        assert mutated != TOY
        compile(mutated, "toy.py", "exec")
        if mutant.mutated:
            assert mutated.splitlines()[line - 1].strip() == mutant.mutated != mutant.place.text


def test_what_does_not_compile_is_no_mutant():
    source = "def f():\n    try:\n        pass\n    except:\n        raise\n"
    assert all(mutate(source, 4, one) is None for one in mutations(source, 4))


def test_a_mutant_follows_its_line_and_a_line_that_changed_is_gone(root):
    mutant = next(one for one in drawn(root) if one.place.text == "for _ in range(2):")
    moved = "\n\n" + TOY
    assert mutant.apply(moved)[0] == mutant.apply(TOY)[0] + 2
    assert mutant.apply(TOY.replace("range(2)", "range(3)")) is None
    assert mutant.apply(TOY.replace("def clamp", "def bound")) is None


def test_equal_lines_of_two_functions_are_two_places():
    source = "def a():\n    return 1\n\n\ndef b():\n    return 1\n    return 1\n"
    found = [place for place in places("x.py", source).values() if place.text == "return 1"]
    assert [(place.inside, place.nth) for place in found] == [("a", 0), ("b", 0), ("b", 1)]


def test_weights_are_of_the_longest_name_and_lines_of_more_are_drawn_more_often(tmp_path):
    weights = {"torchstrat/data": 4.0, "torchstrat/data/rows.py": 0.5}
    names = ["torchstrat/data/rows.py", "torchstrat/data/loader.py", "torchstrat/data_other.py"]
    assert [weight_of(name, weights) for name in names] == [0.5, 4.0, 1.0]
    for name in ("heavy.py", "light.py"):
        (tmp_path / name).write_text("".join(f"A{number} = {number}\n" for number in range(20)))
    for weights, least in (({"heavy.py": 9.0}, 8), ({"light.py": 0.0}, 10)):
        files = [one.place.file for one in drawn(tmp_path, 0, 10, ("heavy.py", "light.py"), weights)]
        assert files.count("heavy.py") >= least


@pytest.mark.parametrize(
    ("text", "covered_by"),
    [
        ("LIMIT,", {"value = min(", "value,", "LIMIT,", ")"}),  # one statement, on whatever line Python says it is
        ("for _ in range(2):", {"for _ in range(2):"}),
        ("@property", {"return self.start + self.start"}),  # run at import: what it is for
        ("start = 0", {"return self.start + self.start"}),
    ],
)
def test_the_lines_that_tests_of_a_line_run(text, covered_by):
    lines = TOY.splitlines()
    assert {lines[number - 1].strip() for number in lines_to_cover(TOY, line_of(text))} == covered_by


def test_tests_of_a_constant_are_those_of_all_functions_of_its_file():
    covered = lines_to_cover(TOY, line_of("LIMIT = 3"))
    assert {line_of("return low"), line_of("return self.start + self.start")} <= covered
    assert line_of("start = 0") not in covered


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("tests/a.py::b[int|None]", ("tests/a.py::b[int|None]", False)),
        ("tests/a.py::b[c (call)] (setup)", ("tests/a.py::b[c (call)]", True)),
        ("tests/a.py::b (setup)|tests/a.py::c[x|y]", ("tests/a.py::c[x|y]", False)),
        ("", ("", False)),
    ],
)
def test_a_context_names_its_test(context, test):
    assert test_of(context) == test


class FakePytest:
    """Answers for tests that fail with the mutant, and for those that always fail; notes what it was asked."""

    def __init__(self, tree, kills="", always="", status=1):
        self._tree, self._kills, self._always, self._status = tree, kills, always, status
        self.asked = []

    def __call__(self, tests):
        names = "".join(test[-1] for test in tests)
        self.asked.append(names)
        is_mutated = (self._tree / "toy.py").read_text() != TOY
        for name in names:
            if name in self._always or (is_mutated and name in self._kills):
                status = 1 if name in self._always else self._status
                return Ended(status, (f"t.py::{name}",) if status == 1 else ())
        return Ended(0)


@pytest.mark.parametrize(
    ("told", "outcome", "by", "asked"),
    [
        ({}, SURVIVED, "", ["abcd"]),
        ({"kills": "c"}, KILLED, "t.py::c", ["abcd", "c"]),  # it fails with the mutant alone
        ({"always": "b", "kills": "d"}, KILLED, "t.py::d", ["abcd", "b", "acd", "d"]),
        ({"always": "abcd"}, SURVIVED, "too many tests fail without the mutant too", None),
        ({"kills": "a", "status": 4}, KILLED, "pytest ended with status 4", ["abcd", "a"]),  # it cannot even start
        ({"kills": "a", "status": None}, TIMED_OUT, None, ["abcd", "abcd"]),
        # The fastest come first, and what there is no time for is left out: 10 seconds, half of 35 less 15.
        ({"seconds": (9, 2, 1, 3)}, SURVIVED, "", ["cbd"]),
        ({"seconds": (90, 91, 92, 93)}, SURVIVED, "", ["a"]),
        ({"seconds": (1, 1, 2, 2), "possible": "ab"}, SURVIVED, "", ["cdab"]),  # who may run the line comes last
    ],
)
def test_what_tests_make_of_a_mutant(root, told, outcome, by, asked):
    (root / "t.py").write_text("")
    names, seconds, possible = ([f"t.py::{n}" for n in "abcd"], told.pop("seconds", (1,) * 4), told.pop("possible", ""))
    run = FakePytest(root, **told)
    trials = Trials(root, run, dict(zip(names, seconds, strict=True)), limit_seconds=35.0)
    certain, may = (frozenset(n for n in names if (n[-1] in possible) is is_may) for is_may in (False, True))
    verdict = trials.try_out("toy.py", TOY.replace("LIMIT = 3", "LIMIT = 4"), Covering(certain, may))
    assert (root / "toy.py").read_text() == TOY
    assert verdict.outcome == outcome
    assert by in (None, verdict.by)
    assert asked in (None, run.asked)
    if told == {"kills": "c"}:
        assert dataclasses.replace(verdict, seconds=0) == Verdict(KILLED, "t.py::c", 4, 4)


def test_without_tests_a_mutant_is_not_covered(root):
    trials = Trials(root, FakePytest(root), {}, 90.0)
    assert trials.try_out("toy.py", "", Covering(frozenset(), frozenset())).outcome == NOT_COVERED


@pytest.fixture
def report(root):
    report = Report(root / "reports" / "report.json", {"seed": 0}, drawn(root, count=3))
    report.write()
    return report


def test_an_interrupted_run_goes_on(report):
    tried: list[Mutant] = []

    def judge(mutant):
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(mutant)
        return Verdict(KILLED, "t.py::a")

    with pytest.raises(KeyboardInterrupt):
        go_on(report, judge)
    again = Report.read(report.file)
    assert again.untried == [2]
    go_on(again, lambda mutant: tried.append(mutant) or Verdict(SURVIVED))
    assert tried == report.mutants
    assert Report.read(report.file).untried == []


def test_what_timed_out_counts_as_killed_and_lines_that_are_gone_do_not_count(report):
    go_on(report, lambda mutant: Verdict([TIMED_OUT, NOT_COVERED, GONE][report.mutants.index(mutant)]))
    assert report.share == 50.0
    assert report.summary() == "50.0 % of 2 killed (1 gone, 1 not covered, 1 timed out)"
    table = report.file.with_suffix(".md").read_text()
    assert all(f"`{mutant.place.text}`" in table for mutant in report.mutants)
