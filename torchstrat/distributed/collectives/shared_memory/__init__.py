"""Memory that the processes of one host share, and how they take turns in it. Linux on x86-64.

From the inside out::

    neighbours.py     processes find each other, prove who they are, and pass descriptors
    lockstep.py       a sequence number per rank: publish, sleep until the others come (futex), notice who died
    common_memory.py  memory without a name, whose size is certain before it is touched, and in it tensors that all
                      ranks see and each may change for itself
    in_place_sum.py   sum lists of tensors where they lie, by blocks that ranks write in turns and that fit the cache
    device_copies.py  to a device and back, for ranks that compute there

`torchstrat.distributed.collectives.shm` makes a `Communicator` of them.

Imports from `core`.
"""
