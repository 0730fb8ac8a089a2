"""How processes find and trust each other: secret, control sockets, rendezvous, and the process that hosts a role."""
