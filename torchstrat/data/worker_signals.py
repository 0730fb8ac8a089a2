"""What data-loading processes do about a signal that is meant for the training."""

from __future__ import annotations

import os
import signal
import sys
import threading


def outlive_preemption(worker: int = 0) -> None:
    """``worker_init_fn`` of a `DataLoader` with ``num_workers``, in a program that saves on SIGTERM::

        DataLoader(dataset, num_workers=4, worker_init_fn=ts.data.outlive_preemption)

    torchrun and Slurm send SIGTERM to all processes, those that load data too. Those die of it, and their `DataLoader`
    raises in the training process, before it has come to the end of its step. After this call a process ends only of a
    SIGTERM that its own parent sends, as a `DataLoader` does with those that do not end otherwise, or, as ever, when
    the parent is gone.

    Linux only; elsewhere it does nothing. ``worker`` is not used. A ``worker_init_fn`` of your own calls this.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    # PyTorch has set a handler in C by now, which knows who sent the signal and is not to be had from Python. A thread
    # that waits for the signal hears of the sender; it gets it as long as no other thread does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="torchstrat-sigterm-of-the-parent", daemon=True).start()
