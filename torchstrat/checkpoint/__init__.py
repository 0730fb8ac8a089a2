"""Checkpoints: state that outlives its cluster.

From the public class downwards::

    checkpoint.py      `Checkpoint`: save and restore
    saving.py          `SaveHandle`: a save that may still be under way; one at a time
    writing.py         the two halves of a save: the state at one moment, and its way to the disk
    sharing.py         who of several processes writes what
    processes.py       several processes do that together
    items.py           the objects of a checkpoint: modules, variables, anything with a state_dict
    selection.py       which part is restored, and what becomes of names that do not fit
    optimizer_item.py  optimizers, by the names of their parameters
    pieces.py          what things are called: paths, and pieces of tensors
    files.py           writing pieces of tensors, and other values, to a file of each process
    entries.py         such a file: blocks of rows, a few MB at a time, with checksums
    stored.py          opening what is there
    reading.py         reading pieces of it, or only checking them first
    entry_reading.py   one entry of a file
    manifest.py        what is where, and checksums
    folder.py          a folder that appears whole or not at all
    disk.py            every change on the disk
    torch_index.py     the index for torch.distributed.checkpoint
    torch_folder.py    what torch.distributed.checkpoint wrote
    manager.py         `CheckpointManager`: which checkpoints to keep in one directory, and which to restore
    numbered.py        what is in that directory
    pending_saves.py   its asynchronous saves
    writer_lock.py     one writer for it
    damage.py          whether a checkpoint is what was written
    job_state.py       random numbers and counters of the job itself
    plain.py           a plain `state_dict` in a file, as a checkpoint
    consolidate.py     a checkpoint as a plain `state_dict` in a file
    safetensors_file.py  that format

What lives on parameter servers: `torchstrat.parameter_server.variables.server_checkpoint` and
`torchstrat.parameter_server.server.service`.
"""

from torchstrat.checkpoint.checkpoint import Checkpoint
from torchstrat.checkpoint.consolidate import consolidate
from torchstrat.checkpoint.manager import CheckpointManager
from torchstrat.checkpoint.saving import SaveHandle
from torchstrat.checkpoint.selection import SkippedKeys

__all__ = ["Checkpoint", "CheckpointManager", "SaveHandle", "SkippedKeys", "consolidate"]
