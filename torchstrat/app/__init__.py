"""The application behind ``torchstrat train`` and ``scripts/train.py``: what it trains, its loops, its reports.

Not imported by ``import torchstrat``. Reading order: `targets` (what a configuration calls), `loop` (the one training
step and the README's loop around it), `asynchronous` (the same step under parameter servers), `train` (which of them a
run takes, and the evaluator's role), `data`, `models`, `report` (what lies in a run's folder), `launch` (one Hydra for
all ranks). Hydra, scikit-learn, matplotlib, TensorBoard and tqdm (``pip install torchstrat[experiments]``) are imported
where they are used.

Imports from `checkpoint`, `core`, `data`, `distributed`, `launch`, `parameter_server`, `sharding`, `strategies` and
`torchstrat`.
"""
