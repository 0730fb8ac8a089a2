"""Which processes a job has, and how they exchange tensors.

`cluster_resolver`, `launcher` and what they read (torchrun, ``TF_CONFIG``, Slurm, Kubernetes, MPI) say who takes part;
`collectives` are process groups, shared memory and the agreement on calls.

Imports from `core`.
"""
