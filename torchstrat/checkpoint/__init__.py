"""Checkpoints: state that outlives its cluster.

From the public class downwards::

    checkpoint.py      `Checkpoint`: save and restore
    writing.py         a save: the state at one moment, its way to the disk, the handle that tells of it
    items.py           the objects of a checkpoint: modules, variables, anything with a state_dict
    optimizer_item.py  optimizers, by the names of their parameters
    job_state.py       random numbers and counters of the job itself; its processes, which save together
    pieces.py          what things are called: paths, and pieces of tensors; which of them are restored
    files.py           the files of each process: blocks of rows, a few MB at a time, with checksums
    torch_folder.py    what torch.distributed.checkpoint wrote, and the index of our files for it
    stored.py          opening what is there, a plain `state_dict` in a file too, and whether it is what was written
    reading.py         reading pieces of it, or only checking them first
    manifest.py        what is where, and checksums
    folder.py          a folder that appears whole or not at all, by one writer
    disk.py            every change on the disk
    manager.py         `CheckpointManager`: which checkpoints to keep in one directory, and which to restore
    numbered.py        what is in that directory, and whether there will be more
    safetensors_file.py  a format of such files
    consolidate.py     a checkpoint as a plain `state_dict` in a file, also from the shell
    preemption.py      `PreemptionHandler`: told to end, save first
    evaluation.py      evaluating the checkpoints of a training that runs elsewhere; its results: journal.py

What lives on parameter servers: `torchstrat.parameter_server.variables.server_checkpoint` and
`torchstrat.parameter_server.server.service`.

Imports from `core`, `data`, `distributed` and `replicas`.
"""

from torchstrat.checkpoint.checkpoint import Checkpoint
from torchstrat.checkpoint.consolidate import consolidate
from torchstrat.checkpoint.manager import CheckpointManager
from torchstrat.checkpoint.pieces import SkippedKeys
from torchstrat.checkpoint.writing import SaveHandle

__all__ = ["Checkpoint", "CheckpointManager", "SaveHandle", "SkippedKeys", "consolidate"]
