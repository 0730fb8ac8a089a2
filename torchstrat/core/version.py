"""torchstrat's version: what processes of one cluster compare, and checkpoints and reports name."""

__version__ = "0.1.0"
