"""The application behind ``scripts/train.py``: data, models, the training loop, what it reports, how it is launched.

Not imported by ``import torchstrat``. Reading order: `objectives` (the one training step), `loop` (the README's loop,
with bookkeeping around it), `asynchronous` (the same step under parameter servers), `evaluate` (the evaluator's role),
`data`, `models`, `scores`, `report` (what lies in a run's folder), `launch` (one Hydra for all ranks). TPUs: `tpu`,
`logical_devices` (models that are cut over them), `programs`. Click logs: `click_rows`, `click_logs`,
`synthetic_clicks`, `wide_and_deep`. Hydra, scikit-learn, matplotlib, TensorBoard and tqdm
(``pip install torchstrat[experiments]``) are imported where they are used.
"""
