"""Train a model under any strategy; the same as ``torchstrat train``.

::

    python scripts/train.py strategy=mirrored strategy.replicas=2
    python scripts/train.py -m strategy=one_device,mirrored,central_storage strategy.replicas=2
    torchrun --nproc-per-node 2 scripts/train.py strategy=central_storage
    python scripts/train.py data=csv data.path=rows.csv model=mlp optimizer=adamw
    python scripts/train.py model._target_=mine.MyNet model.width=64 optimizer._target_=torch.optim.NAdam
    python scripts/train.py strategy=parameter_server strategy.workers=4 optimizer.momentum=0
    torchstrat launch --ps 2 --workers 4 --evaluator scripts/train.py strategy=parameter_server resume=auto
    python scripts/train.py checkpoint.every_steps=50 checkpoint.max_to_keep=3 resume=auto
    python scripts/train.py --help

Settings are described in ``docs/tutorials/hydra.md``; results go to one folder per run, printed at its end.
"""

import sys

if __name__ == "__main__":
    try:
        from torchstrat.app.train import main
    except ModuleNotFoundError as error:
        if error.name != "hydra":
            raise
        sys.exit("error: this needs hydra, which is not installed: pip install 'torchstrat[experiments]'")
    sys.exit(main())
