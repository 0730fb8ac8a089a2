"""What errors of a server advise to do."""

MORE_SERVERS = "Use more parameter servers with a variable_partitioner, or machines with more memory."


def advice_for_whole(optimizer: str) -> str:
    """For a variable that is not cut because of an optimizer of that class."""
    return (
        f"{optimizer} steps it, and may look at all of it, so it is on one server, whole. If {optimizer} treats each "
        f"element by itself, say so: ParameterServerStrategy(…, elementwise_optimizers=[{optimizer}])."
    )
