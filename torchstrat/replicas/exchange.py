"""Values combined over replicas: `all_reduce` and `all_gather` as differentiable functions of nests of tensors; and
`reduce` and `gather` between processes, where every rank learns all components and then combines them by the same rules
in the same order as one process would, so results are equal to the last bit, and so are errors.

Many tensors go from one rank to the others in few messages (`broadcast_tensors`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torchstrat.core import nest, reduction
from torchstrat.core.engine import Communicator
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import Axis, ReduceOp, as_tensor
from torchstrat.core.tensor_bytes import bytes_of
from torchstrat.distributed.collectives.agreement import agree, all_equal, code

_LARGE_BYTES = 1 << 20  # above this, adding up on the way beats collecting all components


def gather_components(communicator: Communicator, local: list[object], axis: int) -> Any:
    """`Strategy.gather` over all ranks' components (a rank may bring none)."""
    call = f"gather(axis={axis})"
    own = prepare(
        communicator, call, local, _require_picklable, lambda all_of: reduction.gather_components(all_of, axis)
    )
    return reduction.gather_components(own.components or gather_values(communicator, local, call), axis)


class Prepared(NamedTuple):
    """What `prepare` has made ready."""

    part: list[Any]
    """This rank's."""
    is_alike: bool
    """Whether all ranks' parts are of the same kind, which is not empty."""
    components: list[torch.Tensor] | None
    """The parts of all, where each is one small tensor and all are of one shape and dtype: these have come along."""


def prepare(
    communicator: Communicator,
    call: str,
    local: list[object],
    make: Callable[[list[Any]], list[Any]],
    in_one_process: Callable[[list[Any]], object],
    kind: Callable[[list[Any]], str] = lambda part: "",
) -> Prepared:
    """Get this rank's part ready, ``make(local)``, and meet the others. Where that fails on some ranks, all of them
    raise what ``in_one_process`` raises, given the components of all."""
    try:
        part, failure = make(local), None
    except Exception as error:
        part, failure = [], error
    own_kind = "" if failure is not None else kind(part)
    small = _small_kind(part)
    values = part[0].detach().double().flatten().tolist() if small else []
    own = (float(failure is not None), code(own_kind), code(small) if small else 0.0)
    rows = agree(communicator, call, (*own, *values, *[0.0] * (_SMALL_NUMEL - len(values))))
    if any(row[0] for row in rows):
        _raise_everywhere(communicator, call, local, in_one_process, failure)
    components = None
    if small and all_equal([row[2:3] for row in rows]):
        rest = [torch.tensor(row[3 : 3 + len(values)], dtype=torch.float64, device="cpu") for row in rows]
        components = [one.to(part[0].dtype).view(part[0].shape) for one in rest]
    return Prepared(part, bool(own_kind) and all_equal([row[1:2] for row in rows]), components)


_SMALL_NUMEL = 8
_EXACT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8})
_EXACT |= {torch.int8, torch.int16, torch.int32}


def _small_kind(part: list[object]) -> str:
    """Of a part that is one tensor of so few elements that it goes into the numbers of a meeting; "" for others."""
    if len(part) != 1 or not isinstance(part[0], torch.Tensor):
        return ""
    tensor: torch.Tensor = part[0]
    if tensor.layout != torch.strided or not 0 < tensor.numel() <= _SMALL_NUMEL or tensor.is_meta:
        return ""
    is_exact = tensor.dtype in _EXACT or (tensor.dtype == torch.int64 and bool((tensor.abs() < 1 << 53).all()))
    return f"{tuple(tensor.shape)} {tensor.dtype}" if is_exact else ""


def _raise_everywhere(
    communicator: Communicator,
    call: str,
    local: list[object],
    in_one_process: Callable[[list[Any]], object],
    failure: Exception | None,
) -> None:
    try:
        mine, why = [_pack(_portable(value)) for value in _require_picklable(local)], None
    except Exception as error:
        mine, why = [], f"{type(error).__name__}: {error}"
    everyone = communicator.all_gather_object((mine, None if failure is None else str(failure), why), call)
    if all(reason is None for _, _, reason in everyone):
        in_one_process([_unpack(value) for values, _, _ in everyone for value in values])
    if failure is not None:
        raise failure
    told = ((rank, text) for rank, (_, text, _) in zip(communicator.ranks, everyone, strict=True) if text is not None)
    rank, text = next(told)
    raise InvalidArgumentError(f"{call} failed on replica {rank}: {text}")


def _require_picklable(values: list[object]) -> list[object]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            pickle.dumps(value)
    return values


def require_alike(communicator: Communicator, call: str, kinds: list[tuple[tuple[int, ...], str, str]]) -> None:
    """Meet the other ranks in ``call``, which needs tensors of these shapes, dtypes and layouts on all of them."""
    rows = agree(communicator, call, (code(repr(kinds)),))
    if all_equal(rows):
        return
    each = ", ".join(
        f"{'; '.join(' '.join(map(str, kind)) for kind in other)} on replica {rank}"
        for rank, other in zip(communicator.ranks, communicator.all_gather_object(kinds, call), strict=True)
    )
    raise InvalidArgumentError(
        f"{call} got {each}; shapes, dtypes and layouts must be equal (nothing is broadcast). To join tensors of "
        "different length use all_gather. If these are of different calls, one replica has left a call out."
    )


def gather_values(communicator: Communicator, local: list[Any], call: str) -> list[Any]:
    """The components of all ranks (a rank may bring none), in rank order, on the CPU."""
    agree(communicator, call)
    local = [_portable(value) for value in local]
    metas = communicator.all_gather_object([_meta(value) for value in local], call)
    first = metas[0]
    if not any(metas):
        raise InvalidArgumentError(
            f"{call} got a value without components: no replica took part in the run that it comes from, because none "
            "had rows. Skip batches without rows."
        )
    if len(first) == 1 and first[0] is not None and all(meta == first for meta in metas):
        return communicator.all_gather(local[0], call)
    packed = [_pack(value) for value in local]
    return [_unpack(value) for values in communicator.all_gather_object(packed, call) for value in values]


class _Packed(NamedTuple):
    """A dense tensor for the way: pickle does not know all dtypes, and takes the whole storage under a view along."""

    content: bytes
    shape: torch.Size
    dtype: torch.dtype


def _pack(value: object) -> object:
    if not isinstance(value, torch.Tensor) or _meta(value) is None:
        return value
    content = bytes_of(value.resolve_conj().resolve_neg().contiguous()).numpy().tobytes()
    return _Packed(content, value.shape, value.dtype)


def _unpack(value: object) -> Any:
    if not isinstance(value, _Packed):
        return value
    if not value.content:
        return torch.empty(value.shape, dtype=value.dtype)
    return torch.frombuffer(bytearray(value.content), dtype=torch.uint8).view(value.dtype).view(value.shape)


def _portable(value: object) -> object:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _meta(value: object) -> object:
    """What must be equal for tensors to travel as they are; None: send it as an object."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return tuple(value.shape), value.dtype
    return None


def reduce_values(communicator: Communicator, op: ReduceOp, local: list[object], axis: Axis) -> Any:
    """`Strategy.reduce` over all ranks' components."""
    call = f"reduce({op.value.lower()}, axis={axis})"
    if axis is None:
        return _reduce_elementwise(communicator, op, local, call)

    # Each rank reduces its own part first; only shares and counts travel.
    def share(values: list[object]) -> list[object]:
        tensors = [reduction.as_tensor(value, "reduce") for value in values]
        return [(*reduction.sum_and_count(tensor, axis, op), tensor.dtype) for tensor in tensors]

    parts = prepare(communicator, call, local, share, lambda all_of: reduction.reduce_components(op, all_of, axis)).part
    shares = gather_values(communicator, [share for share, *_ in parts], call)
    counts = gather_values(communicator, [count_and_dtype for _, *count_and_dtype in parts], call)
    total = reduction.combine(ReduceOp.SUM, shares)
    if op is ReduceOp.SUM:
        return total
    return (total / sum(count for count, _ in counts)).to(reduction.mean_dtype(counts[0][1]))


def _reduce_elementwise(communicator: Communicator, op: ReduceOp, local: list[object], call: str) -> Any:
    def convert(values: list[object]) -> list[object]:
        return [reduction.as_tensor(value, "reduce") for value in values]

    def in_one_process(components: list[object]) -> object:
        return reduction.reduce_components(op, components, None)

    tensors, is_alike, components = prepare(communicator, call, local, convert, in_one_process, _kind_if_large)
    if not is_alike:
        return reduction.combine(op, components or gather_values(communicator, tensors, call))
    return _reduce_dense(communicator, op, tensors[0].detach(), call).cpu()


def _kind_if_large(tensors: list[Any]) -> str:
    if len(tensors) != 1 or tensors[0].layout != torch.strided or tensors[0].nbytes <= _LARGE_BYTES:
        return ""
    (tensor,) = tensors
    return "" if tensor.dtype == torch.bool else f"{tuple(tensor.shape)} {tensor.dtype}"


def weighted_mean(communicator: Communicator, local: list[object], weights: list[float | None]) -> torch.Tensor:
    """`Strategy.reduce` by weights, which only the ranks themselves know."""
    call = "reduce(mean, weighted=True)"

    def convert(values: list[object]) -> list[Any]:
        reduction.require_known(weights)
        return [reduction.as_tensor(value, "reduce") for value in values]

    def in_one_process(components: list[object]) -> object:
        return reduction.reduce_components(ReduceOp.MEAN, components, None)

    own = prepare(communicator, call, local, convert, in_one_process)
    values = own.components or gather_values(communicator, own.part, call)
    shares = gather_values(communicator, [torch.tensor(weight, dtype=torch.float64) for weight in weights], call)
    return reduction.weighted_mean(values, [float(share) for share in shares])


def reduce_number(communicator: Communicator, op: ReduceOp, number: complex, *, must_be_equal: bool = False) -> object:
    """`Strategy.reduce` of a Python number that is no component of a value: each rank's own counts, equal or not."""
    numbers = gather_values(communicator, [number], f"reduce({op.value.lower()}) of a Python number")
    if op is ReduceOp.MEAN and all(other == number for other in numbers):
        return number
    if must_be_equal:
        reduction.require_known([None] * len(numbers))
    return reduction.reduce_components(op, numbers, None)


Gathered = tuple[list[torch.Tensor], list[tuple[int, int]]]
"""What each tensor has become, and where in it this rank's part begins and how long that is."""


def gather_in_step(communicator: Communicator, axis: int, tensors: list[torch.Tensor]) -> Gathered:
    """``all_gather`` of a replica's code."""
    joined, parts = [], []
    for tensor in tensors:
        components = gather_values(communicator, [tensor], f"all_gather(axis={axis})")
        total = reduction.gather_components(components, axis, "all_gather")
        start = sum(component.shape[axis] for component in components[: communicator.rank])
        joined.append(total.to(tensor.device))
        parts.append((start, tensor.shape[axis]))
    return joined, parts


def reduce_in_step(communicator: Communicator, op: ReduceOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``all_reduce`` of a replica's code."""
    call = f"all_reduce({op.value.lower()})"
    require_alike(communicator, call, [(tuple(one.shape), str(one.dtype), str(one.layout)) for one in tensors])
    return [_reduce_one(communicator, op, tensor, call) for tensor in tensors]


def _reduce_one(communicator: Communicator, op: ReduceOp, tensor: torch.Tensor, call: str) -> torch.Tensor:
    if tensor.layout != torch.strided:
        return reduction.combine(op, gather_values(communicator, [tensor], call), call).to(tensor.device)
    return _reduce_dense(communicator, op, tensor, call)


def _reduce_dense(communicator: Communicator, op: ReduceOp, tensor: torch.Tensor, call: str) -> torch.Tensor:
    mean = op is ReduceOp.MEAN
    total = tensor.to(reduction.sum_dtype(tensor.dtype) if mean else tensor.dtype, copy=True).contiguous()
    communicator.all_reduce(total, call).wait()
    return total.div_(communicator.size).to(reduction.mean_dtype(tensor.dtype)) if mean else total


Exchange = Callable[..., Any]


class _Weighs(Protocol):
    """The engine, as the functions below know it."""

    gradient_op: ReduceOp

    def relative_weight(self) -> float: ...
    def exchange_all_reduce(self, op: ReduceOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]: ...


class AllReduce(torch.autograd.Function):
    """Combines tensors over replicas; backward combines the incoming gradients, by weight, with the same operation."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, op: ReduceOp, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.op = exchange, op
        return tuple(exchange(op, [tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *_combined_by_weight(ctx.exchange.__self__, ctx.op, gradients))


class AllGather(torch.autograd.Function):
    """Joins tensors over replicas; backward sums the incoming gradients, by weight, and cuts out the own part."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, axis: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined, parts = exchange(axis, [tensor.detach() for tensor in tensors])
        ctx.exchange, ctx.axis, ctx.parts = exchange, axis, parts
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        combined = _combined_by_weight(ctx.exchange.__self__, ReduceOp.SUM, gradients)
        own = [g.narrow(ctx.axis, start, size) for g, (start, size) in zip(combined, ctx.parts, strict=True)]
        return (None, None, *own)


def _combined_by_weight(engine: _Weighs, op: ReduceOp, gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What arrives here of the replicas' gradients, for a replica whose own weight is applied later.

    What a strategy minimises is the weighted mean of the replicas' losses (or their sum), and the engine applies a
    replica's weight after its backward pass. A gradient that comes over from another replica must therefore bring that
    one's weight in place of this one's: it is multiplied before it leaves and divided by the receiver's where it
    arrives.
    """
    weight = 1.0 if engine.gradient_op is ReduceOp.SUM else engine.relative_weight()
    if weight == 0.0:  # it sends nothing: its own may be nan, which no factor makes 0
        sent: Sequence[torch.Tensor] = [torch.zeros_like(gradient) for gradient in gradients]
    else:
        sent = gradients if weight == 1.0 else [gradient * weight for gradient in gradients]
    combined: list[torch.Tensor] = list(AllReduce.apply(engine.exchange_all_reduce, op, *sent))  # type: ignore[no-untyped-call]
    if weight == 1.0:
        return combined
    # Of weight 0 it has no share in the gradient, whatever arrives.
    return [gradient / weight if weight else torch.zeros_like(gradient) for gradient in combined]


def differentiable(
    function: type[torch.autograd.Function], value: object, exchange: Exchange, how: object, call: str
) -> object:
    """Apply one of the functions above to the leaves of a nest, in a single exchange."""
    tensors = [as_tensor(leaf, call) for leaf in nest.flatten_by_keys(value)]
    if not tensors:
        return value
    for tensor in tensors:
        if tensor.dtype == torch.bool and function is AllReduce:
            raise WrongTypeError(
                f"{call} cannot combine bool tensors; convert them to an integer or floating dtype first."
            )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        exchange.__self__.span_replicas()  # type: ignore[attr-defined]
    combined = iter(function.apply(exchange, how, *tensors))
    return nest.map_by_keys(lambda _: next(combined), value)


_CHUNK_BYTES = 32 << 20


def broadcast_tensors(communicator: Communicator, tensors: Sequence[torch.Tensor], source: int, what: str) -> None:
    """Overwrite ``tensors`` with those of rank ``source``. All ranks pass tensors of equal shapes, dtypes and layouts,
    in one order; and the tensors themselves, since the scale of a quantized one is not in the memory that another view
    of it shares."""
    if not tensors:
        return
    with torch.no_grad():
        for chunk in _chunks([_once(tensor.detach()) for tensor in tensors if _is_dense(tensor)]):
            if len(chunk) == 1 and _goes_as_it_is(chunk[0]):  # large ones are alone: no copy of them
                communicator.broadcast(chunk[0], source, what)
                continue
            flat = torch.cat([_bytes(tensor) for tensor in chunk])  # not all dtypes can be joined as they are
            communicator.broadcast(flat, source, what)
            if communicator.rank != source:
                pieces = flat.view(chunk[0].dtype).split([tensor.numel() for tensor in chunk])
                for tensor, piece in zip(chunk, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))
        for tensor in tensors:
            if not _is_dense(tensor):
                received = communicator.broadcast_object(tensor if communicator.rank == source else None, source, what)
                if communicator.rank != source:
                    tensor.copy_(received)


def average_tensors(communicator: Communicator, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Overwrite ``tensors`` with their means over all ranks, which get the same bits. All ranks pass dense tensors of
    equal shapes and floating dtypes, in one order."""
    with torch.no_grad():
        for chunk in _chunks([_once(tensor.detach()) for tensor in tensors]):
            total = torch.cat([tensor.reshape(-1) for tensor in chunk])
            if total.dtype == torch.float16:  # the sum may not exist where the mean does
                total.div_(communicator.size)
            communicator.all_reduce(total, what).wait()
            if total.dtype != torch.float16:
                total.div_(communicator.size)
            for tensor, piece in zip(chunk, total.split([tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def broadcast_gradients(
    communicator: Communicator,
    gradients: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
    source: int,
    what: str,
) -> list[torch.Tensor | None]:
    """The gradients of rank ``source`` for the tensors ``like``, which may be missing or sparse there and not here.

    Dense ones that exist here are overwritten in place.
    """
    kinds = communicator.broadcast_object([_kind(gradient) for gradient in gradients], source, what)
    is_source = communicator.rank == source
    received: list[torch.Tensor | None] = []
    for gradient, tensor, kind in zip(gradients, like, kinds, strict=True):
        if kind == "sparse" and not is_source:
            gradient = communicator.broadcast_object(None, source, what).to(tensor.device)
        elif kind == "sparse":
            communicator.broadcast_object(gradient, source, what)
        elif kind == "dense" and _kind(gradient) != "dense":
            gradient = torch.empty_like(tensor, requires_grad=False)
        received.append(None if kind is None else gradient)
    dense = [one.detach() for one, kind in zip(received, kinds, strict=True) if one is not None and kind == "dense"]
    broadcast_tensors(communicator, dense, source, what)
    return received


def _kind(gradient: torch.Tensor | None) -> str | None:
    if gradient is None:
        return None
    return "dense" if gradient.layout == torch.strided else "sparse"


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of one that is expanded, so that each element is there, and is written, once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all of it: a quantized one has a scale beside them, and cannot be seen as bytes."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def _goes_as_it_is(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor.resolve_conj().resolve_neg().contiguous())


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype and device, together at most 32 MiB (or a single one)."""
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and (tensor.dtype != chunk[0].dtype or tensor.device != chunk[0].device or held + size > _CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += size
    if chunk:
        yield chunk
