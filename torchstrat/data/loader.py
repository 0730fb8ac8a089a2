"""A `DataLoader` as a source: its own dataset, collate function and workers, with rows shared over replicas.

In one process the loader's own sampler is used, and each global batch is collated once and cut. Over several processes
a map-style dataset is shared by index: a process fetches and collates the rows of its own replicas only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, default_collate

from torchstrat.core import nest
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.randomness import RandomGenerator, RandomStreams, generators_in
from torchstrat.data import rows, spec
from torchstrat.data.loader_batches import (
    Collate,
    CollateAndSplit,
    CollateToCut,
    IterableLoader,
    Opened,
    OwnFiles,
    Share,
    SplitBatch,
    read_by,
    served,
    share_of,
)
from torchstrat.data.options import PathLike, files_of_worker, reads_files
from torchstrat.data.order import (
    Counted,
    Draws,
    Index,
    IndexOrder,
    Served,
    index_sampler,
    refuse_indices_of_the_whole,
    sampler_name,
    stateful_part,
    streams_of,
)
from torchstrat.data.own_draws import (
    Leaving,
    OwnDraws,
    Seeds,
    apart,
    draws_nothing,
    generators_of_data,
    leave_for_next_pass,
    seeds_of_pass,
    stream_seed,
    treats_rows_alone,
)
from torchstrat.data.pipeline import Pipeline, View, cardinality_of, len_of
from torchstrat.data.position import Place, Resume, Stream, generators_now
from torchstrat.data.sequence import drawing_again, is_stateful, own_state, unmoved
from torchstrat.data.sources import Source, make_source, set_loader_source
from torchstrat.data.streams import Step, copies
from torchstrat.data.workers import draw_for_workers, generator_of_workers


class LoaderSource(Source):
    """A `DataLoader` whose iteration is torch's own. Settings are read off it; it is not changed.

    Columns of strings are what the loader makes of them, lists; those of our own datasets, such as `TextLineDataset`,
    are object arrays, as their ``batch`` makes them.
    """

    def __init__(self, loader: DataLoader[object], strings_as_arrays: bool | None = None) -> None:
        self.loader = loader
        as_arrays = isinstance(loader.dataset, Pipeline) if strings_as_arrays is None else strings_as_arrays
        self._convert = rows.strings_to_arrays if as_arrays else rows.to_tensors
        sampler = index_sampler(loader)
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._auto_collated = loader.batch_sampler is not None
        declared = getattr(sampler, "batch_size", None) if loader.batch_size is None else loader.batch_size
        self.declared_batch = declared if isinstance(declared, int) else None
        self._drops = bool(loader.drop_last or getattr(sampler, "drop_last", False))
        self.cardinality = cardinality_of(loader)
        self.reads = "rows in sequence" if self._iterable else "rows by index"
        self.rereads = self._iterable
        self.has_workers = loader.num_workers > 0
        self.exclusive = loader.persistent_workers
        self._inner: DataLoader[object] | None = None
        self._given = _Requests()
        self._settled_workers = False
        self._generators: list[RandomGenerator] | None = None
        batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        self._sequence = IterableLoader(
            loader,
            lambda dataset, collate, generator: _like(
                loader, dataset, generator=generator, collate_fn=collate, **batching
            ),
        )

    @functools.cached_property
    def streams(self) -> RandomStreams:
        return self._sequence.streams if self._iterable else streams_of(self.loader, self._owned())

    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        if not self.loader.in_order and self.has_workers:
            if resume is not None:
                _refuse_out_of_order()
            alone = self.pipeline is None
            batches = iter(self.loader) if alone else self._read(self.loader.collate_fn, None).items
            return Stream(map(self._convert, batches), Place, _refuse_out_of_order)
        return self._converted(self.loader.collate_fn, resume)

    def _converted(self, collate: Collate, resume: Resume | None) -> Stream[nest.Nest]:
        batches = self._read(collate, resume)
        return replace(batches, items=map(self._convert, batches.items))

    def open_to_cut(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        collate = self.loader.collate_fn
        if not self._auto_collated or collate is default_collate or not self.loader.in_order:
            return self.open(resume)
        return self._converted(CollateToCut(collate), resume)

    @property
    def draws(self) -> bool:
        return not (self.has_workers or draws_nothing(self.loader))

    @property
    def compared(self) -> bool:
        return self._iterable  # else rank 0's indices make every rank read the same

    def open_equal_chunks(
        self, layout: InputLayout, ahead: int, resume: Resume | None = None
    ) -> tuple[Stream[Step], Callable[[int], None]]:
        if layout.num_replicas == 1:
            return super().open_equal_chunks(layout, ahead, resume)
        if layout.peers is not None and not self._iterable:
            return self._open_by_index(layout, ahead, resume)
        if not self._auto_collated:
            return super().open_equal_chunks(layout, ahead, resume)
        return self._open_and_split(layout, resume), _nothing

    def _open_and_split(self, layout: InputLayout, resume: Resume | None) -> Stream[Step]:
        """Every batch in full, collated and split where it is loaded."""
        batches = self._read(self._splitting(layout, compare=layout.num_workers > 1), resume)
        return replace(batches, items=map(_step_of, batches.items))

    def _read(self, collate: Collate, resume: Resume | None) -> Stream[nest.Nest]:
        """Batches as ``collate`` makes them, in the loader's own order."""
        if self._iterable:
            return self._sequence.open(collate, resume, self.pipeline)
        opened: list[tuple[Draws, Counted]] = []
        owned = self._owned()
        own, generator, seeds = None, self.loader.generator, None
        if self.pipeline is not None:
            of_pass = PassDraws(self.loader, owned, False, resume)
            own, generator = of_pass.begin_alone(self.pipeline)
            seeds = of_pass.seeds
        read_in = _Reads(own, 0 if resume is None else resume.place.batches, self.pipeline or 0)
        self._given.begin(_ordering(self.loader, self.streams, resume, opened, read_in), self._between(generator))
        with self._opening(resume), apart(self._copied() if self.pipeline else (), self.pipeline or 0):
            batches = iter(self._inner_loader(generator, collate))
            draws, order = opened[-1]
            draws.begin()
        if resume is not None:
            RandomStreams((), owned).put(resume.beginning.get("data", {}))  # of a position of version 1
        served = Served(batches if own is None else Leaving(batches, own), order, draws.first_place)
        beginning = beginning_with(draws.beginning, seeds)
        return Stream(served, served.stand, beginning, here=own is not None)

    def _between(self, generator: torch.Generator | None) -> Callable[[], None]:
        """What to draw when torch draws the seed of workers, from ``generator``."""
        return _no_draw if generator is self.loader.generator else functools.partial(draw_for_workers, self.loader)

    def _open_by_index(
        self, layout: InputLayout, ahead: int, resume: Resume | None
    ) -> tuple[Stream[Step], Callable[[int], None]]:
        """Rank 0's order; of each batch only the rows of this process's replicas are fetched and collated."""
        assert layout.peers is not None
        loader, auto_collated = self.loader, self._auto_collated
        by_rows = not self.reads_whole
        owned = self._owned()
        draws = PassDraws(loader, owned, not by_rows, resume)
        ahead += loader.num_workers * (loader.prefetch_factor or 1)
        order = IndexOrder(loader, layout.peers, ahead, self.streams, resume, draws.seeds)
        counted = Counted(iter(order), order.place_before, auto_collated, order.draws)
        to_request, to_serve = itertools.tee(share_of(index, layout, auto_collated, by_rows) for index in counted)
        with contextlib.nullcontext() if resume is None else spec.undisturbed_randomness():
            own, generator = draws.begin(order, layout.worker_index)
        collate = loader.collate_fn if by_rows or not auto_collated else self._splitting(layout, compare=False)
        inner = self._inner_loader(generator, collate)
        requests = _requests(to_request, draws.first, own)
        self._given.begin(lambda: requests, self._between(generator))
        with self._opening(resume), apart(self._copied() if by_rows else (), layout.worker_index):
            batches = iter(inner) if own is None else Leaving(iter(inner), own)
            order.begin()
        if collate is loader.collate_fn:
            items = served(to_serve, map(self._convert, batches), layout)
        else:
            items = map(_step_of, batches)
        steps = Served(items, counted, order.place_before())
        beginning = beginning_with(order.beginning, draws.seeds)
        return Stream(steps, steps.stand, beginning, here=draws.here), order.prepare

    def _splitting(self, layout: InputLayout, compare: bool) -> CollateAndSplit:
        replicas, local = layout.num_replicas, layout.local_replicas
        return CollateAndSplit(self.loader.collate_fn, self._convert, replicas, local, compare)

    @property
    def reads_whole(self) -> bool:
        """Whether every process reads whole batches, though it could read its own rows by their indices."""
        return not (self._iterable or self.rows_alone or treats_rows_alone(self.loader))

    @property
    def batches_made_by(self) -> str:
        dataset, collate = self.loader.dataset, self.loader.collate_fn
        if not self._auto_collated or collate is default_collate:
            return f"the data set {type(dataset).__name__}, which is asked for many rows at once,"
        return f"the collate function {getattr(collate, '__qualname__', type(collate).__qualname__)}"

    def _owned(self) -> list[RandomGenerator]:
        """Generators from which the data set draws in this process; looked for once."""
        if self._generators is None:
            drawing = not self.has_workers and not draws_nothing(self.loader)
            self._generators = generators_of_data(self.loader.dataset, self.loader.collate_fn) if drawing else []
        return self._generators

    def _copied(self) -> list[RandomGenerator]:
        """Generators of the data set, of which each of the loader's workers takes a copy."""
        copies = self.has_workers and not draws_nothing(self.loader)
        return generators_of_data(self.loader.dataset, self.loader.collate_fn) if copies else []

    def _inner_loader(self, generator: torch.Generator | None, collate: Collate) -> DataLoader[object]:
        """The user's loader, but for its order; kept where its workers are."""
        if self._inner is None or not self.exclusive:
            name = "batch_sampler" if self._auto_collated else "sampler"
            batching: dict[str, object] = {name: self._given} | ({} if self._auto_collated else {"batch_size": None})
            self._inner = _like(self.loader, generator=generator, collate_fn=collate, **batching)
            self._inner.in_order = self.loader.in_order or self.pipeline is None
        self._inner.generator = generator
        return self._inner

    @contextlib.contextmanager
    def _opening(self, resume: Resume | None) -> Iterator[None]:
        """Around the opening of the inner loader, which draws a seed for its workers.

        That draw has been made already in the run that is gone on with: within a pass, or where workers persist, it is
        not to move the streams once more.
        """
        if resume is not None:
            stateful = stateful_part(index_sampler(self.loader))
            with drawing_again(resume, self.streams if stateful is None else RandomStreams(()), whole=True):
                yield
        elif self._settled_workers:
            self._settled_workers = False
            with self._given.drawn_from(RandomStreams(own=generators_in(self.loader))):
                yield
        else:
            yield

    def settings(self) -> dict[str, object]:
        if self._iterable:
            return self._sequence.settings()
        found: dict[str, object] = {"number of rows": len_of(self.loader.dataset), "sampler": sampler_name(self.loader)}
        return found | {"generators": RandomStreams((), generators_in(self.loader)).own_kinds}

    def between(self) -> dict[str, object]:
        if self._iterable:
            return self._sequence.between()
        stateful = stateful_part(index_sampler(self.loader))
        own = {} if stateful is None else {"own": own_state(stateful)}
        return {"workers": self._inner is not None, **own, **generators_now(self.streams)}

    def settle(self, between: Mapping[str, Any]) -> None:
        if self._iterable:
            self._sequence.settle(between)
            return
        self.streams.put(between.get("streams", {}))  # of a position of version 1, as the next
        RandomStreams((), self._owned()).put(between.get("data", {}))
        if "own" in between and (stateful := stateful_part(index_sampler(self.loader))) is not None:
            stateful.load_state_dict(between["own"])
        self._settled_workers = self.exclusive and self._inner is None and between.get("workers", False)

    def element_spec(self) -> nest.Nest:
        with spec.undisturbed_randomness():
            example = self._example()
        if not self._auto_collated:
            return spec.spec_of(self._convert(example), rows_fixed=False)
        batch = self._convert(self.loader.collate_fn(copies([example], of_tensors=True)))
        # Only torch's own collate function says that examples have one shape; any other may pad.
        found = spec.spec_of(batch, rows_fixed=False, trailing_fixed=self.loader.collate_fn is default_collate)
        count = self.declared_batch if self._drops else None
        return nest.map_structure(lambda leaf: leaf.with_rows(count), found)

    def _example(self) -> object:
        dataset = self.loader.dataset
        if isinstance(dataset, range):
            return 0
        if isinstance(dataset, TensorDataset):
            return tuple(tensor.new_zeros(tensor.shape[1:]) for tensor in dataset.tensors)
        if self._iterable:
            data = read_by(dataset)
            with unmoved(dataset if is_stateful(dataset) else None):
                elements = data.read(View()) if isinstance(data, Pipeline) else iter(dataset)
                for element in elements:
                    return element
        if self._iterable or len_of(dataset) == 0:
            raise InvalidArgumentError(
                f"element_spec is not known: the {type(dataset).__name__} of the DataLoader is empty, and does not say "
                "what its elements would be."
            )
        lists = not self._auto_collated and isinstance(self.loader.sampler, BatchSampler)
        return dataset[[0] if lists else 0]

    @property
    def files(self) -> Sequence[PathLike] | None:
        return self.loader.dataset.files if reads_files(self.loader.dataset) else None

    def for_files(self, worker: int, workers: int) -> Source:
        dataset = self.loader.dataset
        if not reads_files(dataset):
            return super().for_files(worker, workers)
        files = files_of_worker(dataset.files, worker, workers)
        return self._with_dataset(OwnFiles(dataset, files))

    def for_hint(self, worker: int, workers: int) -> Source:
        dataset = self.loader.dataset
        shard = getattr(dataset, "shard", None)
        if not callable(shard):
            return self
        if self._iterable:
            return self._with_dataset(Opened(make_source(dataset).for_hint(worker, workers)))
        part = shard(workers, worker)
        shuffles = refuse_indices_of_the_whole(self.loader)
        return self._with_dataset(part, **({} if isinstance(part, IterableDataset) else {"shuffle": shuffles}))

    def _with_dataset(self, dataset: object, **batching: object) -> LoaderSource:
        loader = self.loader
        batching |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        other = _like(loader, dataset, generator=loader.generator, collate_fn=loader.collate_fn, **batching)
        return LoaderSource(other, strings_as_arrays=self._convert is rows.strings_to_arrays)


set_loader_source(LoaderSource)


def _step_of(batch: SplitBatch) -> Step:
    return Step(batch.parts, batch.sizes, batch.checksum)


def _requests(shares: Iterator[Share], first: int, draws: OwnDraws | None) -> Iterator[Index]:
    for number, share in enumerate(shares, first):
        yield from share.requested(number, draws)


def _ordering(
    loader: DataLoader[object],
    streams: RandomStreams,
    resume: Resume | None,
    opened: list[tuple[Draws, Counted]],
    read_in: _Reads,
) -> Callable[[], Iterator[Index]]:
    """What opens the loader's own order, and notes it in ``opened``; batches are read as ``read_in`` says.

    A `DataLoader` with workers opens it twice, before and after it draws their seed; the second is what it uses. Not a
    method: what is kept by a loader must not keep its source, and so the loader and its workers, alive.
    """
    grouped = loader.batch_sampler is not None

    def open_order() -> Iterator[Index]:
        draws = Draws(index_sampler(loader), streams, grouped, resume)
        order = Counted(draws, lambda: draws.first_place, grouped, draws)
        opened.append((draws, order))
        return order if read_in.draws is None else read_in.entering(order)

    return open_order


class _Reads(NamedTuple):
    """From what a pipeline's batches are read."""

    draws: OwnDraws | None
    first: int
    """The number of the first batch."""
    pipeline: int

    def entering(self, order: Iterable[Index]) -> Iterator[Index]:
        """A loader without workers reads a batch as soon as it has been given its indices."""
        assert self.draws is not None
        for number, index in enumerate(order, self.first):
            self.draws.enter(number, self.pipeline)
            yield index


class _Requests:
    """The (batch) sampler of the inner loader: hands on what is to be fetched in the current epoch."""

    def __init__(self) -> None:
        self.begin(lambda: iter(()), _no_draw)
        self._streams = RandomStreams(())
        self._before: dict[str, object] = {}

    def begin(self, draw: Callable[[], Iterator[Index]], between: Callable[[], None]) -> None:
        """For the next epoch, which ``draw`` opens. A loader that starts workers has it opened twice, and draws their
        seed ``between``."""
        self._draw, self._between, self._opened = draw, between, False

    def __iter__(self) -> Iterator[Index]:
        if self._opened:
            self._between()
        self._opened = True
        self._streams.put(self._before)
        return self._draw()

    @contextlib.contextmanager
    def drawn_from(self, streams: RandomStreams) -> Iterator[None]:
        """Requests that are begun within this are drawn from where ``streams`` stand now."""
        self._streams, self._before = streams, streams.states()
        try:
            yield
        finally:
            self._streams, self._before = RandomStreams(()), {}


def _like(loader: DataLoader[object], dataset: Any = None, **changes: Any) -> DataLoader[object]:
    """A loader with the settings of ``loader``, but for the changes. Batches come in the order of requests, by which
    positions count; what is read without a position sets ``in_order``."""
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        **changes,
    )


def _refuse_out_of_order() -> NoReturn:
    raise UnsupportedError(
        "the DataLoader has in_order=False: its batches come as workers finish them, so what has been handed out is no "
        "part of an order that one could go on with. Leave in_order out, or save the data position between passes."
    )


def _no_draw() -> None:
    """Torch draws from the user's own."""


def _nothing(step: int) -> None:
    """Reading this source needs no preparation."""


class PassDraws:
    """Decides it for one pass.

    Where each process reads its own rows, every replica has streams of its own; where each reads a pipeline of its own,
    every pipeline has. Where each reads whole batches, all draw the same: from the process's streams, as plain PyTorch
    does, if those stand at the same place on all ranks; else from streams made for it.

    Args:
        loader: the user's.
        owned: generators that belong to its data set.
        whole: whether every process reads whole batches.
        resume: where to go on.
    """

    def __init__(
        self, loader: DataLoader[object], owned: Sequence[RandomGenerator], whole: bool, resume: Resume | None
    ) -> None:
        self._loader, self._owned, self._whole, self._resume = loader, owned, whole, resume
        beginning = {} if resume is None else resume.beginning
        RandomStreams((), owned).put(beginning.get("data", {}))  # of a position of version 1
        self._had_own = bool(beginning.get("draws"))
        self._here = loader.num_workers == 0 and not draws_nothing(loader)
        self.seeds: Seeds | None = None
        """This rank's, to be told to the others where that matters."""
        if self._had_own:
            self.seeds = (beginning["draws"][0], beginning["draws"][1])
        elif whole or self._here:
            self.seeds = seeds_of_pass(loader.generator, owned)

    def begin(self, order: IndexOrder, rank: int) -> tuple[OwnDraws | None, torch.Generator | None]:
        """What reading a batch draws from if not from the process's streams, and what the loader draws the seed of its
        workers from."""
        self.seeds = order.seeds
        shared = self._whole and order.alike and not self._had_own
        if shared:
            self.seeds = None
            return None, self._loader.generator
        if self._whole and self.seeds is not None and self._loader.num_workers:
            return None, torch.Generator().manual_seed(stream_seed(self.seeds[0], self.first))
        return self._own(), generator_of_workers(self._loader, rank)

    def begin_alone(self, pipeline: int) -> tuple[OwnDraws | None, torch.Generator | None]:
        """`begin`, where no other process reads the same."""
        return self._own(), generator_of_workers(self._loader, pipeline)

    def _own(self) -> OwnDraws | None:
        if not self._here or self.seeds is None:
            return None
        if self._resume is None:
            leave_for_next_pass(self._owned)
        return OwnDraws(self.seeds, self._owned)

    @property
    def first(self) -> int:
        """The number of the first batch that is read."""
        return 0 if self._resume is None else self._resume.place.batches

    @property
    def here(self) -> bool:
        """Whether batches have to be taken in the caller's thread."""
        return self._here


def beginning_with(
    of_order: Callable[[], dict[str, object]], seeds: Seeds | None = None
) -> Callable[[], Mapping[str, object]]:
    """What it takes to draw the order again, and what the data set draws. It outlives the loader's workers."""
    return lambda: {**of_order(), "draws": seeds}
