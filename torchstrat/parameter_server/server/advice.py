"""What errors of a server advise to do."""

MORE_SERVERS = "Use more parameter servers with a variable_partitioner, or machines with more memory."
