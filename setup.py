"""Installation: ``pip install .`` for the library, ``pip install -e .[experiments,dev]`` to work on it."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent

# Addresses. Empty until there is one; each is written here and nowhere else.
SOURCE = ""  # of the repository, such as https://host/owner/torchstrat
SOURCE_FILES = ""  # what a path in the repository is put behind, such as https://host/owner/torchstrat/blob/main
DOCS = ""
MAIL = ""  # for what SECURITY.md asks not to be public

PROGRESS = [
    "tqdm>=4.66",  # ts.progress: bars where people wait
]

EXPERIMENTS = [
    "hydra-core>=1.3.2",  # composes configs/ into one run, and sweeps over them; 1.3.2 is the first for Python 3.11
    "omegaconf>=2.3",  # the schema's `int | None` and `list[str]` need 2.3
    "scikit-learn>=1.3",  # carries the handwritten digits inside the package: real images without a download
    "tensorboard>=2.14",  # torch.utils.tensorboard writes its event files
    "matplotlib>=3.7",  # the picture of the curves
    *PROGRESS,
]

TPU = [
    "torch==2.9.*",  # torch_xla 2.9 is built against exactly this torch
    "torch_xla[tpu]==2.9.*",  # the last line of torch_xla; the [tpu] extra brings libtpu
]

DEV = [
    "pytest>=8.0",  # the tests; 8.0 is where assertion and importlib behaviour the suite relies on settled
    "ruff>=0.9",  # lint
    "mypy>=1.14",  # types, strict
    "import-linter>=2.0",  # which folder may import which
    "hypothesis>=6.100",  # generated histories for the state machine that schedules functions
    "build>=1.2",  # sdist and wheel
    "setuptools>=77",  # builds them without isolation, so that their test needs no index; see pyproject.toml
    "twine>=6.1",  # checks them; 6.1 knows License-Expression
    "sybil>=9.0",  # finds the blocks of code in docs/ that tests/docs runs
    "nbclient>=0.10",  # runs notebooks as Jupyter does
    "ipykernel>=6.29",  # the kernel that they run in
    "coverage>=7.13",  # scripts/coverage: forked processes, and those that leave with os._exit, are measured too
]

MUTANTS = [
    # Operators. Of the two tools that are kept (the other is mutmut), this has them as a library: objects that say
    # where in a file they act, and act. mutmut's come with its way to run tests: all mutants of a function in the file
    # at once, switched by a variable, in forks of one process. Tests here start many.
    "cosmic-ray>=8.7",
]

DOCS_TOOLS = [
    "sphinx>=8.1",  # scripts/docs
    "myst-parser>=4.0",  # pages in Markdown
    "furo>=2024.8",  # the theme
]

PROGRAMS = [
    "transformers>=5.0",  # the language models, speech and images that most people train
    "timm>=1.0",  # images, with optimizers, schedules and moving averages of its own
    "diffusers>=0.35",  # noise schedules and nets that are conditioned
    "peft>=0.17",  # adapters: most parameters are frozen, and modules are wrapped
    "torch_geometric>=2.6",  # graphs: batches that are no rows of one tensor
    "pytorch_optimizer>=3.8",  # fifteen optimizers as other people write them
    "schedulefree>=1.4",  # optimizers with two sets of weights
]


def long_description() -> str:
    """README.md, as a package index shows it: relative links lead into the repository once it has an address."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not SOURCE_FILES:
        return text
    # ](docs/x.md), ](#part) and src="picture.png"; what has a scheme, or begins with # or /, is left.
    relative = re.compile(r"(\]\(|(?:src|href)=\")(?![a-z+.-]+:|[#/])")
    return relative.sub(lambda link: f"{link[1]}{SOURCE_FILES}/", text)


class BuildWithConfigs(build_py):
    """Copies configs/ into the wheel, for ``torchstrat train``. An editable install reads configs/ itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy = Path(self.build_lib, "torchstrat", "app", "configs")
            shutil.rmtree(copy, ignore_errors=True)  # of an earlier build, with files that are gone
            shutil.copytree(HERE / "configs", copy)


setup(
    name="torchstrat",
    version="0.1.0",
    description="One training step, many distribution strategies: the PyTorch counterpart of tf.distribute.",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The torchstrat authors",
    author_email=MAIL or None,
    license_expression="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=["pytorch", "distributed training", "tf.distribute", "parameter server", "data parallel"],
    url=DOCS or SOURCE or None,
    project_urls={name: address for name, address in (("Source", SOURCE), ("Documentation", DOCS)) if address},
    python_requires=">=3.10",
    # Said although it is the default: setuptools makes a plain path entry of an editable install where it is said, and
    # else an import hook, which type checkers do not see through.
    package_dir={"": "."},
    packages=find_packages(include=["torchstrat", "torchstrat.*"]),
    # py.typed tells type checkers that the annotations are to be used; the notes on one part live beside its code.
    package_data={"": ["py.typed", "*.md"]},
    include_package_data=False,
    zip_safe=False,
    cmdclass={"build_py": BuildWithConfigs},
    install_requires=[
        "torch>=2.9",
        "numpy>=1.26",  # torch does not require it; arrays are accepted as data, and strings travel as object arrays
        "cloudpickle>=3.0",  # sends functions of a script or a notebook to workers; a well-kept library beats our own
    ],
    entry_points={"console_scripts": ["torchstrat = torchstrat.app.cli:main"]},
    extras_require={
        "progress": PROGRESS,  # ts.progress
        "experiments": EXPERIMENTS,  # torchstrat train, scripts/train.py and scripts/demo
        "tpu": TPU,  # TPUStrategy
        "docs": DOCS_TOOLS,  # scripts/docs
        "dev": DEV,  # scripts/test, scripts/check and scripts/coverage
        "mutants": MUTANTS,  # scripts/mutants
        "programs": PROGRAMS,  # scripts/soak programs
    },
    # What has been run: on CPUs, Linux and no other system, these versions of Python.
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
