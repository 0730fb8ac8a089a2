"""Rows of a dataset, leased to scheduled functions, so that an epoch sees every row exactly once.

Reading order: `dataset` (what the user holds, and the account of it), `epoch` (which row is where, and the order),
`lease` (one function's rows, and the worker's side).

Imports from `core`, `data`, `parameter_server/serialization` and `parameter_server/worker`.
"""
