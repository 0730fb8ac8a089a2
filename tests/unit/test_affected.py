"""How ``./scripts/test --fast`` chooses tests: in a made checkout, where it is known which ones are right."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from scripts.measuring.affected import Tree, changed_files, choose
from scripts.measuring.core_cells import CELLS, stays
from scripts.measuring.fast import arguments, words

FILES = {
    "torchstrat/__init__.py": "from torchstrat.mirrored import Mirrored\nfrom torchstrat.data import Pipeline\n",
    "torchstrat/mirrored.py": "from torchstrat import engine\nclass Mirrored: ...\n",
    "torchstrat/engine.py": "",
    "torchstrat/data/__init__.py": "from .pipeline import Pipeline\n",
    "torchstrat/data/pipeline.py": "class Pipeline: ...\n",
    "torchstrat/alone.py": "",
    "tests/unit/helper.py": "import torchstrat.data.pipeline\n",
    "tests/unit/test_pipeline.py": "from torchstrat.data.pipeline import Pipeline\n",
    "tests/unit/test_a_inside.py": "def test():\n    from torchstrat.data import pipeline\n",
    "tests/unit/test_b_alias.py": "import torchstrat as ts\nts.Pipeline\n",
    "tests/unit/test_c_list.py": "from torchstrat import Pipeline\n",
    "tests/unit/test_d_helper.py": "from tests.unit import helper\n",
    "tests/unit/test_engine_by_mirrored.py": "import torchstrat as ts\nfrom torchstrat.mirrored import Mirrored\n",
    "tests/unit/test_half_written.py": "def test(:\n",
    "tests/launch/test_programs.py": "from torchstrat.data.pipeline import Pipeline\n",
    "tests/tpu/test_x.py": "",
    "README.md": "",
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def _chosen(root, *changed, limit=10):
    return [file.rpartition("/")[2] for file in choose(Tree(root), changed, limit).files]


@pytest.mark.parametrize(
    ("changed", "limit", "chosen"),
    [
        # One of this name comes before the others that import it. A list of names goes through another module, with
        # one import less than an alias.
        ("torchstrat/data/pipeline.py", 10, "test_pipeline test_a_inside test_c_list test_b_alias test_d_helper"),
        # A module between is near, and a list of names is not.
        ("torchstrat/engine.py", 10, "test_engine_by_mirrored"),
        # What changed itself comes first, wherever it is.
        (
            "torchstrat/data/pipeline.py tests/launch/test_programs.py tests/unit/test_d_helper.py",
            3,
            "test_programs test_d_helper test_pipeline",
        ),
    ],
)
def test_nearest_first(root, changed, limit, chosen):
    assert _chosen(root, *changed.split(), limit=limit) == [f"{name}.py" for name in chosen.split()]


def test_tests_that_are_gone_are_not_chosen_and_those_of_modules_that_are_gone_are(root):
    (root / "tests/unit/test_pipeline.py").unlink()
    (root / "torchstrat/mirrored.py").unlink()
    chosen = _chosen(root, "tests/unit/test_pipeline.py", "torchstrat/mirrored.py")
    assert chosen == ["test_engine_by_mirrored.py"]


def test_what_is_left_out_is_said(root):
    changed = ["README.md", "tests/tpu/test_x.py", "torchstrat/alone.py", "torchstrat/data/pipeline.py"]
    choice = choose(Tree(root), changed, limit=2, without=("tests/tpu/",))
    assert len(choice.left_out) == 3
    lines = words(changed, choice)
    assert lines == [
        "4 changed files; nearest to them: tests/unit/test_pipeline.py tests/unit/test_a_inside.py",
        "left out, further away or over 6: 3 more test files",
        "no test file is near to README.md, torchstrat/alone.py",
        "left to ./scripts/test tests/tpu: tests/tpu/test_x.py",
    ]


def test_a_file_of_the_contract_runs_whole_where_it_is_chosen(root, monkeypatch):
    ((chosen, ends),) = CELLS.items()
    other = "tests/unit/test_contract_of_more.py"
    monkeypatch.setitem(CELLS, other, ends)
    (root / chosen).write_text("from torchstrat import engine\n")
    given = arguments(choose(Tree(root), [chosen], limit=2))
    assert given == [other, f"--cells-of={other}", chosen]
    assert stays(f"{chosen}::test[any-mirrored x4]", [other])
    assert stays(f"{other}::test[any-mirrored x2]", [other])
    assert not stays(f"{other}::test[any-mirrored x4]", [other])
    assert not stays(f"{other}::test[compiled-mirrored x2]", [other])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_has_changed(root, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # a hook's, such as of a commit that runs these tests
        monkeypatch.delenv(name, raising=False)

    def git(*arguments):
        identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)

    def commit(name):
        (root / name).write_text("changed = 1\n")
        git("add", "-A")
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("torchstrat/engine.py")
    commit("torchstrat/alone.py")
    assert changed_files(root) == ["torchstrat/alone.py"]  # of the last commit
    git("checkout", "-b", "work")
    commit("torchstrat/new.py")
    commit("torchstrat/mirrored.py")
    assert changed_files(root) == ["torchstrat/mirrored.py", "torchstrat/new.py"]  # of the branch
    (root / "torchstrat/engine.py").write_text("")
    (root / "torchstrat/untracked.py").write_text("")
    assert changed_files(root) == [f"torchstrat/{name}.py" for name in ("engine", "mirrored", "new", "untracked")]
    git("checkout", "--force", "main")
    assert changed_files(root) == ["torchstrat/untracked.py"]  # nothing of the last commit: there is something newer


def test_nothing_has_changed_where_there_is_no_repository(root, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
    assert changed_files(root) == []
