"""What a parameter-server run reads: its rows on the workers, and their order on the coordinator.

Imported on workers, which need nothing else of the application.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from torchstrat.experiments import data


class TrainingRows:
    """Called on each worker, it reads the training rows, all of them: which ones a step gets is only known then."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self._call = with_absolute_paths(call)

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
        self._beginning = loader.generator.get_state()
        rows = _RowNumbers(len(loader.dataset))  # type: ignore[arg-type]
        # A loader, not only its sampler: loaders draw from the generator themselves at the start of each pass.
        self._batches = DataLoader(
            rows, batch_sampler=loader.batch_sampler, generator=loader.generator, collate_fn=list
        )
        self._passes, self._state = 0, self._beginning  # how many were gone through, and what they left behind

    def __call__(self, epoch: int) -> Iterator[int]:
        """The rows of epoch ``epoch``, counted from 0. Goes through the ones before first, if they have not been."""
        if epoch < self._passes:
            self._passes, self._state = 0, self._beginning
        self._generator.set_state(self._state)
        while self._passes < epoch:
            for _ in self._one_pass():
                pass
        yield from self._one_pass()

    def _one_pass(self) -> Iterator[int]:
        for batch in self._batches:
            yield from batch
        self._passes, self._state = self._passes + 1, self._generator.get_state()


class _RowNumbers(Dataset[int]):
    """Row n is the number n."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> int:
        return index


def with_absolute_paths(call: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings for a process that may have been started in another folder."""
    paths = {key: call[key] for key in ("path", "test_path") if isinstance(call.get(key), str)}
    return {**call, **{key: str(Path(path).expanduser().resolve()) for key, path in paths.items()}}
