"""The role ``ps``: what a parameter server holds, and what it does when it is told to. No sockets, no rpc."""
