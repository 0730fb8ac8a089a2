"""Installation: ``pip install .`` for the library, ``pip install -e .[experiments,dev]`` to work on it."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

EXPERIMENTS = [
    "hydra-core>=1.3.2",  # composes configs/ into one run, and sweeps over them; 1.3.2 is the first for Python 3.11
    "omegaconf>=2.3",  # the schema's `int | None` and `list[str]` need 2.3
    "scikit-learn>=1.3",  # carries the handwritten digits inside the package: real images without a download
    "tensorboard>=2.14",  # torch.utils.tensorboard writes its event files
    "matplotlib>=3.7",  # the picture of the curves
    "tqdm>=4.66",  # the progress bar
]

TPU = [
    "torch==2.9.*",  # torch_xla 2.9 is built against exactly this torch
    "torch_xla[tpu]==2.9.*",  # the last line of torch_xla; the [tpu] extra brings libtpu
]

DEV = [
    "pytest>=8.0",  # the tests; 8.0 is where assertion and importlib behaviour the suite relies on settled
    "ruff>=0.9",  # lint
    "mypy>=1.14",  # types, strict
    "hypothesis>=6.100",  # generated histories for the state machine that schedules functions
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

setup(
    name="torchstrat",
    version="0.1.0",
    description="One training step, many distribution strategies: the PyTorch counterpart of tf.distribute.",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["torchstrat", "torchstrat.*"]),
    # py.typed tells type checkers that the annotations are to be used; the notes on one part live beside its code.
    package_data={"": ["py.typed", "*.md"]},
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        "torch>=2.9",
        "numpy>=1.26",  # torch does not require it; arrays are accepted as data, and strings travel as object arrays
        "cloudpickle>=3.0",  # sends functions of a script or a notebook to workers; a well-kept library beats our own
    ],
    entry_points={"console_scripts": ["torchstrat = torchstrat.cli:main"]},
    extras_require={
        "experiments": EXPERIMENTS,  # scripts/train.py and scripts/demo
        "tpu": TPU,  # TPUStrategy
        "dev": DEV,  # scripts/test and scripts/check
        "programs": PROGRAMS,  # scripts/soak programs
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX",
        "Typing :: Typed",
    ],
)
