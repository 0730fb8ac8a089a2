"""Kinds of numbers in a step: complex ones by what this compiler does rightly, and by their parts; mixed precision.

torch_xla 2.9 has other values or gradients for many functions of complex numbers (quotients, cross products, ``tanh``)
and none for others. Those of `_RIGHT` have been compared with the host's, values and gradients; the rest is refused.

Under ``vmap`` layers are taken apart before autocast sees them, so that it finds none of its functions. Their arguments
are cast here, as autocast itself would cast them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional as F

from torchstrat.core import nest
from torchstrat.core.errors import ContextError, UnsupportedError
from torchstrat.core.reduction import HALF
from torchstrat.core.tensor_classes import setter
from torchstrat.sharding.tpu.lanes import Arguments, Function, Options, TensorSet
from torchstrat.sharding.tpu.limits import current_place


def members(names: str, *owners: object) -> frozenset[object]:
    """What the ``owners`` (`torch`, `torch.Tensor` …) have under these names: functions, and for properties what gets
    their value. What this version of torch lacks is left out."""
    found: set[object] = set()
    for name in names.split():
        for owner in owners:
            member: object = getattr(owner, name, None)
            if callable(member):
                found.add(member)
            elif hasattr(member, "__get__"):
                found.add(member.__get__)
    return frozenset(found)


Tensor = torch.Tensor

_RIGHT_NAMES = """
    H T __reversed__ __add__ __array__ __bool__ __contains__ __eq__ __format__ __getitem__ __hash__ __iter__ __len__
    __matmul__ __mul__ __ne__ __neg__ __pos__ __radd__ __repr__ __rmatmul__ __rmul__ __rsub__ __setitem__
    __sub__ _backward_hooks _is_view _version acos acosh add add_ addcmul addr alias_copy allclose as_tensor
    asarray asin asinh atan atanh atleast_1d atleast_2d atleast_3d backward baddbmm block_diag bmm
    broadcast_tensors broadcast_to cartesian_prod cat cdouble cfloat chunk clone combinations complex concat
    concatenate conj contiguous copy_ cos cosh cpu data detach detach_ device diag diag_embed diagonal
    diagonal_copy diagonal_scatter dim double dsplit dstack dtype element_size empty_like eq equal exp expand
    expand_as expand_copy expm1 fill fill_ flatten flip fliplr flipud full full_like get_device grad grad_fn
    hsplit hstack imag index_select inner is_complex is_conj is_contiguous is_cuda is_floating_point is_leaf
    is_meta is_neg is_nested is_quantized is_same_size is_signed is_sparse is_xla isclose isfinite isreal item
    itemsize kron layout lerp linear log log1p logical_and logical_not logical_or logical_xor mH mT masked_fill
    masked_fill_ matmul meshgrid moveaxis movedim mul mul_ multiply mv name names narrow_copy nbytes ndim
    ndimension ne neg neg_ negative nelement new_empty new_full new_ones new_zeros numel numpy ones_like outer
    output_nr permute permute_copy polar positive pow randn_like ravel real reciprocal register_hook
    requires_grad requires_grad_ reshape reshape_as resolve_conj resolve_neg retain_grad rot90 rsqrt rsub
    scatter scatter_add select shape short silu sin sinh size split split_with_sizes sqrt square squeeze
    squeeze_copy stack storage_offset stride sub sub_ subtract sum sum_to_size swapaxes swapdims t
    take_along_dim tan tensordot to tolist trace transpose transpose_copy tril triu type type_as unbind
    unflatten unsafe_chunk unsafe_split unsqueeze unsqueeze_copy view view_as view_as_complex view_copy vsplit
    vstack where zero_ zeros_like
"""


_RIGHT = members(_RIGHT_NAMES, torch, torch.Tensor, F) | {setter("grad")}


def _imaginary(x: Tensor) -> Tensor:
    return x.resolve_conj().imag  # what is conjugate only by name has no part that can be mapped over lanes


def _size(input: Tensor) -> Tensor:
    """What to divide by before powers are taken, as gradients do, that would leave the range of the type; mostly 1."""
    largest, limits = torch.maximum(input.real.abs(), _imaginary(input).abs()).detach(), torch.finfo(input.real.dtype)
    is_far = (largest >= limits.max**0.1) | ((largest <= limits.tiny**0.1) & (largest > 0))
    return torch.where(is_far & largest.isfinite(), largest, torch.ones_like(largest))


def _absolute(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    size = _size(input)
    result = torch.linalg.vector_norm(_pair(input) / size.unsqueeze(-1), dim=-1) * size
    return result if out is None else out.copy_(result)


def _angle(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    result = torch.atan2(_imaginary(input), input.real)
    return result if out is None else out.copy_(result)


def _quotient(input: Tensor | complex, other: Tensor | complex, *, rounding_mode: None = None) -> Tensor | complex:
    if not isinstance(other, Tensor) or not other.is_complex():
        return input * (1.0 / other)
    per_size = _size(other).reciprocal()
    near = other * per_size
    squares = near.real.square() + _imaginary(near).square()
    return input * near.conj() * squares.reciprocal() * per_size


def _divided(input: Tensor | complex, other: Tensor | complex) -> Tensor | complex:
    return _quotient(other, input)


def _mean(
    input: Tensor, dim: int | list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    total = x.sum() if dim is None else x.sum(dim, keepdim)
    return total * (total.numel() / x.numel() if x.numel() else float("nan"))


def _pair(input: Tensor) -> Tensor:
    return torch.stack([input.real, _imaginary(input)], dim=-1)


def _conjugate(input: Tensor) -> Tensor:
    return torch.complex(input.real, -_imaginary(input))


_BY_PARTS: dict[object, Callable[..., object]] = {
    **dict.fromkeys((torch.abs, torch.absolute, Tensor.abs, Tensor.absolute, Tensor.__abs__), _absolute),
    **dict.fromkeys((torch.angle, Tensor.angle), _angle),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), _quotient),
    **dict.fromkeys((Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__), _quotient),
    Tensor.__rtruediv__: _divided,
    torch.Tensor.__rdiv__: _divided,
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((torch.view_as_real,), _pair),
    **dict.fromkeys((torch.conj_physical, Tensor.conj_physical), _conjugate),
}


def is_any_complex(args: Iterable[object]) -> bool:
    """Whether a tensor among them, or in a list among them, is complex."""
    for one in args:
        if isinstance(one, Tensor):
            if one.dtype.is_complex:
                return True
        elif isinstance(one, list | tuple) and is_any_complex(one):
            return True
    return False


def of_complex(func: Function) -> Function:
    """What to call for ``func`` of complex numbers.

    Raises:
        UnsupportedError: nothing is known to be right.
    """
    replacement = _BY_PARTS.get(func)
    if replacement is not None:
        return replacement
    if func in _RIGHT or func in _TRANSFORMS:
        return func
    raise UnsupportedError(
        f"{getattr(func, '__name__', func)} of complex numbers in a step: this strategy's compiler is not known to "
        f"have its values and gradients (at {current_place()}). Write it with the real and the imaginary part: x.real, "
        "x.imag, torch.complex(real, imag)."
    )


class Pairs:
    """The pairs of parts that a step has asked for (`torch.view_as_real`): copies here, and views elsewhere.

    ``views``: functions that give views of their argument.
    """

    def __init__(self, views: frozenset[object]) -> None:
        self._views = views
        self.made = TensorSet()

    def note(self, func: object, args: Arguments, result: object) -> None:
        """``func(*args)`` was ``result``."""
        if func is _pair or (self.made and func in self._views and args and args[0] in self.made):
            for one in result if isinstance(result, list | tuple) else (result,):
                self.made.add(one)

    def require_unedited(self, target: object) -> None:
        """Raises `UnsupportedError` where an edit would be lost."""
        if target in self.made:
            raise UnsupportedError(
                "an edit in place of what torch.view_as_real gives in a step changes a copy of the complex tensor (at "
                f"{current_place()}). Write the tensor: z.copy_(torch.view_as_complex(pairs * 0.5))."
            )


_TRANSFORMS = frozenset(member for member in vars(torch.fft).values() if callable(member))


# -- mixed precision -----------------------------------------------------------------------------------------------

_LOWER_NAMES = """
    addbmm addmm addmv addr baddbmm bmm chain_matmul einsum matmul mm mv __matmul__ __rmatmul__ conv1d conv2d
    conv3d conv_tbc conv_transpose1d conv_transpose2d convolution conv_transpose3d linear bilinear
    scaled_dot_product_attention _scaled_dot_product_attention max_pool2d lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell multi_head_attention_forward
"""
_WIDE_NAMES = """
    cdist cross_entropy binary_cross_entropy_with_logits instance_norm batch_norm trace l1_loss log_softmax
    cosine_embedding_loss nll_loss hinge_embedding_loss
"""

_LOWER = members(_LOWER_NAMES, torch, torch.Tensor, F, torch.linalg)
_WIDE = members(_WIDE_NAMES, torch, torch.Tensor, F, torch.linalg)
"""They compute in single precision."""

_ALONE = members("dot vdot mv inner tensordot vecdot", torch, torch.Tensor, F, torch.linalg)
"""Autocast leaves them as they are; under ``vmap`` they become products, which it does not."""


def lowered(
    func: object, args: Arguments, kwargs: Options, device_type: str
) -> tuple[Sequence[object], dict[str, object], bool] | None:
    """The arguments of ``func`` under the autocast that is in force, and whether that stays in force within it; None
    for a function that autocast finds by itself.

    Raises:
        ContextError: it is one of the host, and the step computes on other devices.
    """
    if device_type != "cpu" and torch.is_autocast_enabled("cpu"):
        raise ContextError(
            f'torch.autocast("cpu") in a step whose tensors are on {device_type!r} changes nothing (at '
            f"{current_place()}); write torch.autocast({device_type!r}, …), or torch.autocast(x.device.type, …), which "
            "is right on every strategy."
        )
    if not torch.is_autocast_enabled(device_type):
        return None
    if func in _ALONE:
        return args, kwargs, False
    if func in _WIDE:
        return *_cast(args, kwargs, torch.float32, HALF), True
    if func in _LOWER:
        return *_cast(args, kwargs, torch.get_autocast_dtype(device_type), (*HALF, torch.float32)), True
    return None


def _cast(
    args: Arguments, kwargs: Options, dtype: torch.dtype, kinds: tuple[torch.dtype, ...]
) -> tuple[Sequence[object], dict[str, object]]:
    def cast(leaf: object) -> object:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in kinds else leaf

    cast_args, cast_kwargs = nest.map_structure(cast, (list(args), dict(kwargs)))
    return tuple(cast_args), cast_kwargs
