"""Checkpoints: state that outlives its cluster.

From the public class downwards::

    checkpoint.py      `Checkpoint`: save and restore
    processes.py       several processes do that together
    items.py           the objects of a checkpoint: modules, variables, anything with a state_dict
    optimizer_item.py  optimizers, by the names of their parameters
    pieces.py          what things are called: paths, and pieces of tensors
    files.py           pieces in the files of torch.distributed.checkpoint; the only importer of it
    stored.py          opening what is there
    folder.py          a folder that appears whole or not at all
    manifest.py        checksums

What lives on parameter servers: `torchstrat.parameter_server.variables.server_checkpoint` and
`torchstrat.parameter_server.server.checkpoint_shards`.
"""

from torchstrat.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
