"""Clusters of roles on one machine: ``torchstrat launch``, and `Cluster` for notebooks, scripts and tests.

``LocalCluster`` is an older name of `Cluster`, the same class.

::

    command_line.py   what the user typed, checked before anything starts
    launcher.py       the coordinator's process around a local cluster: signals, exit status
    local_cluster.py  the servers and workers of one cluster
    evaluator.py      the evaluator beside it
    supervised.py     one of them: started, watched, started again
    fork_server.py    how workers and servers start in milliseconds; _fork_server.py is what they are forked from
    restarts.py       when it is started again: pure
    ports.py          addresses that stay the cluster's over restarts
    output.py         lines with the name of the task before them
    reaper.py         nothing stays behind, even after kill -9 of the launcher; with _reaper.py and _child.py, small
                      programs of their own that never import torchstrat: importing torch takes seconds
"""

from torchstrat.launch.local_cluster import Cluster
from torchstrat.launch.restarts import RestartPolicy

LocalCluster = Cluster

__all__ = ["Cluster", "LocalCluster", "RestartPolicy"]
