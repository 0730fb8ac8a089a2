"""What lives on the servers, as the coordinator and the workers see it: placement, access, shards, checkpoints."""
