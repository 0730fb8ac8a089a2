"""Replicas of one process: threads that take turns, over components that take each other's place in the user's objects.

`engine` is the `ReplicaEngine`. Beside it, the TPU's engine uses `baton` and `component_attributes` from
here.

Imports from `core`, `distributed` and `replicas`.
"""
