"""Calls between processes of one host: short messages over a unix socket, tensors in memory that both see. Linux.

From the inside out::

    pool.py         tensors whose memory other processes can be shown, and which comes back when they die
    channel.py      a socket that carries messages, and the descriptors of memory that is new to the other side
    connection.py   the end that calls, and owns all memory, and the end that answers
    peers.py        the ways to all processes of this host, which begin with a greeting: what the transport uses

**Who owns what.** Everything is the caller's: tensors of a request, and the places where those of its answer are put.
So a process that is killed takes its memory with it, whatever the others were doing to it, and nothing has a name that
could be left behind. A caller that gives up waiting keeps the memory of that call untouched until the answer comes
after all, or the other process has ended: one that was only stopped goes on where it was.

**Early news.** An answer's tensors are written one after the other, and the handler may say how far it is
(`AnswerMemory.written`): a short message, after which the caller may read those although the call goes on.

**What is trusted.** Both ends of a connection have proved that they know the cluster's secret, and the kernel says that
they belong to one user. Nobody can put anything into a unix socket from outside, so what comes after the greeting is
not sealed again.

Imports from `core`, `distributed`, `parameter_server`, `parameter_server/membership` and
`parameter_server/transport`.
"""
