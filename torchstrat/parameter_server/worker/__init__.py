"""The role ``worker``: runs scheduled functions over its own copy of what the coordinator's scope captured.

::

    service.py    what it answers: one function at a time, from dispatch to outcome
    run.py        one execution of a function: its name for the servers, its pushes, what it reached
    copies.py     this worker's copies of dense variables, and when they are brought up to date
    pending.py    variables that are not current: the class that brings them, whoever uses them
    arrivals.py   parameters whose fresh values are on their way, and who has to wait for them
    table_parameter.py  what an embedding table is here: no memory; its class brings what PyTorch asks for
    tables.py     lookups in it: rows are read from the servers, gradients are sparse
    table_rows.py the rows for lookups, also those that were asked for ahead of them
    row_gradients.py    those sparse gradients, used as one device's dense ones
    steps.py      ``optimizer.step()``: one push to each server, which brings fresh values back
    resources.py  per-worker datasets, iterators and other resources
    phases.py     named places in the above, for tests that kill a worker there
"""
