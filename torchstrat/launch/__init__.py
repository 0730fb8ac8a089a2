"""Clusters of roles on one machine: ``torchstrat launch``, and `Cluster` for notebooks, scripts and tests.

``LocalCluster`` is an older name of `Cluster`, the same class.

::

    launcher.py       the command: what the user typed, the coordinator's process around a local cluster, the evaluator
    local_cluster.py  the servers and workers of one cluster, at addresses that stay theirs over restarts
    supervised.py     one of them: started, watched, started again, by a policy that is pure; and its lines of output
    fork_server.py    how workers and servers start in milliseconds; _fork_server.py is what they are forked from.
                      And nothing stays behind, even after kill -9 of the launcher; by _reaper.py, a small program of
                      its own that never imports torchstrat: importing torch takes seconds

Imports from `checkpoint`, `core`, `distributed`, `parameter_server`, `strategies` and `torchstrat`.
"""

from torchstrat.launch.local_cluster import Cluster
from torchstrat.launch.supervised import RestartPolicy

LocalCluster = Cluster

__all__ = ["Cluster", "LocalCluster", "RestartPolicy"]
