"""Central storage with one replica per process on one host: variables and optimizer state are there once.

::

    portions.py     who steps what
    parameters.py   parameters in memory that all ranks see
    staged.py       those of ranks that compute on devices, with copies there
    state.py        the same for what optimizers keep
    twin.py         a rank's own part of a step
    storage.py      all of it together: what a step and a run call

Which optimizers may step parts of parameters, whole ones, or have to step all at once: `torchstrat.core.optimizers`.

Every rank reads all parameters and all state. Only in a step does anyone write to them, and each element one rank:
between two meetings that no rank passes while another one still reads or writes.
"""
