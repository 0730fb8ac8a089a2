"""Run the training cases in processes that somebody else started, and save their numbers.

::

    torchrun --nproc-per-node 2 -m torchstrat.testing.record central_storage FOLDER

Every process writes ``FOLDER/rank-R.pt``: a dict from the case's name to its `Snapshot`, for `contract.check`. Cases
that need a compiler are left out unless they are named: ``… FOLDER compiled_inductor``.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from torchstrat.distributed.cluster import process_plan_from_torchrun
from torchstrat.testing import contract


def snapshots_path(folder: Path, global_rank: int) -> Path:
    return folder / f"rank-{global_rank}.pt"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchstrat.testing.record", description=__doc__)
    parser.add_argument("row", choices=[*contract.TORCHRUN], help="the strategy, as in contract.TORCHRUN")
    parser.add_argument("folder", type=Path, help="where to write; it has to exist")
    parser.add_argument("cases", nargs="*", help="names in contract.CASES; all of them by default")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.cases) - set(contract.CASES))
    if unknown:
        parser.error(f"no training case is called {', '.join(unknown)}; there are {', '.join(contract.CASES)}")
    plan = process_plan_from_torchrun()
    names = options.cases or [name for name, case in contract.CASES.items() if not case.needs_compiler]
    snapshots = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names:
            snapshots[name] = contract.run_row(contract.CASES[name], contract.TORCHRUN[options.row])
    torch.save(snapshots, snapshots_path(options.folder, 0 if plan is None else plan.rank))


if __name__ == "__main__":
    main()
