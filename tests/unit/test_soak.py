"""``./scripts/soak``, in parts; and ``--repeat``, here and of ``./scripts/test``, when a test fails now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import soak
from tests.matrix import catalog
from tests.support.programs import PYTHON, ROOT, run

TESTS = """
from pathlib import Path
import pytest

def test_that_fails_in_the_second_round():
    with Path("rounds").open("a+") as file:
        file.write("x")
        file.seek(0)
        assert len(file.read()) != 2

@pytest.mark.soak
def test_that_takes_minutes():
    Path("soaked").touch()
"""


@pytest.mark.parametrize(
    ("arguments", "rounds", "soaked", "says"),
    [
        (
            ["--repeat", "3", "-m", "not soak"],  # as ./scripts/test calls it: a failure ends the rounds
            2,
            False,
            ["round 1/3: 1 passed in", "ended by a failure in round 2 of 3: 1 passed, 1 failed", "assert 2 != 2"],
        ),
        (["--repeat=3", "--count"], 3, True, ["3 rounds: 5 passed, 1 failed"]),
    ],
)
def test_rounds(tmp_path: Path, arguments: list[str], rounds: int, soaked: bool, says: list[str]) -> None:
    (tmp_path / "test_toy.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\naddopts = -m 'not soak' -p no:cacheprovider\n")
    quick = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # seconds of imports
    done = run(*PYTHON, ROOT / "scripts" / "soak.py", *arguments, "test_toy.py", cwd=tmp_path, **quick)
    assert done.returncode == 1
    assert len((tmp_path / "rounds").read_text()) == rounds
    assert (tmp_path / "soaked").exists() == soaked
    for text in [*says, f"1/{rounds}  test_toy::test_that_fails_in_the_second_round"]:
        assert text in done.stdout + done.stderr


def test_parts_have_every_table_and_every_file_with_a_test_that_is_marked() -> None:
    tables = {name for name in catalog.MODULES if catalog.load(name).environment == "main"}
    assert {f"table-{name}" for name in tables} <= soak.PARTS.keys()
    places = [ROOT / part.pytest_arguments[0] for part in soak.PARTS.values()]
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.soak" in file.read_text()]
    assert [file for file in marked if not any(file.is_relative_to(place) for place in places)] == []


def test_a_part_that_has_passed_waits_for_a_file_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where the toy leaves a file
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "KEPT", tmp_path / "kept")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\naddopts = -m 'not soak' -p no:cacheprovider\n")
    tests = tmp_path / "tests" / "test_toy.py"
    tests.parent.mkdir()
    part = soak.Part([str(tests)], "nothing")

    def ran() -> tuple[int, str]:
        status = soak.run_part("toy", part, again=False)
        return status, capsys.readouterr().out.splitlines()[-1]

    tests.write_text(TESTS.replace("touch()", "wrong()"))
    assert [ran()[0], ran()[0]] == [1, 1], "what has failed is run again"
    tests.write_text(TESTS)
    assert ran()[1].startswith("toy: 1 passed in")
    assert ran() == (0, "toy: has run, " + soak.shown(soak.kept_of("toy") or {}))
    tests.write_text(TESTS + "# another line")
    assert ran()[1].startswith("toy: 1 passed in")
