"""Replicas: what each does in a run, in a backward pass and in an optimizer's step, and the engines that run them.

What one replica does is written once, on a communicator (`torchstrat.distributed.collectives`); the engines are
`in_process` (several replicas, threads that take turns), `per_process` (one in each process of a job) and `central`
(variables in memory that processes share).

Imports from `core` and `distributed`.
"""
