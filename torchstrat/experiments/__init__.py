"""The application behind ``scripts/train.py``: data, models, the training loop, what it reports, how it is launched.

Not imported by ``import torchstrat``. Reading order: `loop` (the README's loop, with bookkeeping around it), `data`,
`models`, `report` (what lies in a run's folder), `launch` (one Hydra for all ranks), `demo`. Hydra, scikit-learn,
matplotlib, TensorBoard and tqdm (``pip install torchstrat[experiments]``) are imported where they are used.
"""
