"""What a parameter-server run reads: its rows on the workers, and their order on the coordinator.

Imported on workers, which need nothing else of the application.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from torchstrat.experiments import data


class TrainingRows:
    """Called on each worker, it reads the training rows, all of them: which ones a step gets is only known then.

    A ``path`` and a ``test_path`` mean the folder of whoever makes this, not that of a worker.
    """

    def __init__(self, call: Mapping[str, Any]) -> None:
        paths = {key: call[key] for key in ("path", "test_path") if isinstance(call.get(key), str)}
        self._call = {**call, **{key: str(Path(path).expanduser().resolve()) for key, path in paths.items()}}

    def __call__(self) -> Any:
        return data.load(self._call).train


class LoaderOrder:
    """The rows of each epoch in the order in which a shuffled `DataLoader` would go through them.

    So a run on one worker makes the steps of a run without parameter servers, one after the other.

    Args:
        loader: never read from itself; with a generator of its own, that stands where the first epoch begins.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._generator = loader.generator
        self._beginnings = [loader.generator.get_state()]  # of the epochs that were reached so far
        numbers: Any = range(len(loader.dataset))  # type: ignore[arg-type]
        # A loader, not only its sampler: loaders draw from the generator themselves at the start of each pass.
        self._batches: DataLoader[Any] = DataLoader(
            numbers, batch_sampler=loader.batch_sampler, generator=loader.generator, collate_fn=list
        )

    def __call__(self, epoch: int) -> Iterator[int]:
        """The rows of epoch ``epoch``, counted from 0. Goes through the ones before first, if they have not been."""
        for before in range(len(self._beginnings) - 1, epoch):
            deque(self._pass(before), maxlen=0)
        return self._pass(epoch)

    def _pass(self, epoch: int) -> Iterator[int]:
        self._generator.set_state(self._beginnings[epoch])
        for batch in self._batches:
            yield from batch
        if epoch == len(self._beginnings) - 1:
            self._beginnings.append(self._generator.get_state())
