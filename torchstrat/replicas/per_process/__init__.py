"""One replica per process.

`engine` is the `ReplicaEngine`, `step_policies` say who steps what, and `local_engine` is for replicas that step
variables of their own. Whatever involves others is agreed on first (`torchstrat.distributed.collectives.agreement`).

Imports from `core`, `data`, `distributed`, `replicas` and `replicas/central`.
"""
