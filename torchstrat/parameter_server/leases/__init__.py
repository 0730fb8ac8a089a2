"""Rows of a dataset, leased to scheduled functions, so that an epoch sees every row exactly once.

Reading order: `dataset` (what the user holds), `epoch` (which row is where), `ledger` (the account of it), `lease` (one
function's rows), `order`, `reader` (the worker's side), `intervals`.
"""
