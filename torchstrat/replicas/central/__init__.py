"""Central storage with one replica per process on one host: variables and optimizer state are there once.

::

    parameters.py   parameters in memory that all ranks see, and copies of ranks that compute on devices
    state.py        the same for what optimizers keep, and who steps what
    storage.py      all of it together: what a step and a run call, and a rank's own part of a step

Which optimizers may step parts of parameters, whole ones, or have to step all at once: `torchstrat.core.optimizers`.

Every rank reads all parameters and all state. Only in a step does anyone write to them, and each element one rank:
between two meetings that no rank passes while another one still reads or writes.

Imports from `core`, `distributed` and `replicas`.
"""
