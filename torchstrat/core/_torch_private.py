"""Every name of torch that is not public API, in one place, looked up when this file is imported.

If a torch release moves one of them, the import fails here with an error that names torch's version, and this is the
only file to change.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle


def look_up(path: str, module: ModuleType = torch) -> Any:
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ImportError(
                f"torchstrat needs {module.__name__}.{path}, which torch {torch.__version__} does not have. "
                "torchstrat supports torch 2.9 and later; please report the version above."
            ) from None
    return found


_engine = look_up("autograd.Variable._execution_engine")


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that is now running ends, before ``backward()`` returns.

    Only valid inside a hook of that pass; nested (reentrant) passes each have their own end.
    """
    _engine.queue_callback(callback)


hooks_on_gradient: Callable[[torch.Tensor], dict[int, object] | None] = operator.attrgetter("_backward_hooks")
"""What `Tensor.register_hook` has registered, in the order in which it is called; None before the first."""

hooks_after_accumulation: Callable[[torch.Tensor], dict[int, object] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The same of `Tensor.register_post_accumulate_grad_hook`."""

look_up("Tensor._backward_hooks"), look_up("Tensor._post_accumulate_grad_hooks"), look_up("Tensor._version")


def give_hooks(
    tensor: torch.Tensor, on_gradient: dict[int, object] | None, after_accumulation: dict[int, object] | None
) -> None:
    """Have ``tensor`` call what another one has registered, as the two functions above return it."""
    given = {"_backward_hooks": on_gradient, "_post_accumulate_grad_hooks": after_accumulation}
    for name, hooks in given.items():
        if hooks:
            setattr(tensor, name, hooks)


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often its values have been changed in place."""

is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""What it is a view of."""

sparse_indices: Callable[[torch.Tensor], torch.Tensor] = operator.methodcaller("_indices")
sparse_values: Callable[[torch.Tensor], torch.Tensor] = operator.methodcaller("_values")
sparse_count: Callable[[torch.Tensor], int] = operator.methodcaller("_nnz")
"""What a sparse tensor has, whether it is coalesced or not."""

own_parameters: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = operator.attrgetter("_parameters")
own_buffers: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")
own_children: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = operator.attrgetter("_modules")
"""The dictionaries in which a module keeps what it has itself: asking them makes nothing, unlike its methods. Those of
modules of TorchScript are none: they have neither `get` nor an iterator, but keys, values and items."""


def own_buffer(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """The buffer of that name; None where there is none."""
    buffers = own_buffers(module)
    if isinstance(buffers, dict):
        return buffers.get(name)
    return dict(buffers.items()).get(name)


loader_iterator: type = look_up("utils.data.dataloader._BaseDataLoaderIter")
POSITION_IN_LOADER = "_num_yielded"
"""What `iter` of a `DataLoader` makes, and the attribute with the number of batches that it has given."""

unsaved_buffers: Callable[[torch.nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")
hooks_after_module_state: Callable[[torch.nn.Module], dict[int, object]] = operator.attrgetter("_state_dict_hooks")
hooks_before_forward: Callable[[torch.nn.Module], dict[int, object]] = operator.attrgetter("_forward_pre_hooks")

hooks_before_step: Callable[[torch.optim.Optimizer], dict[int, object]] = operator.attrgetter(
    "_optimizer_step_pre_hooks"
)
_hooks_after_state: Callable[[torch.optim.Optimizer], dict[int, object]] = operator.attrgetter(
    "_optimizer_state_dict_post_hooks"
)
hooks_after_step: Callable[[torch.optim.Optimizer], dict[int, object]] = operator.attrgetter(
    "_optimizer_step_post_hooks"
)

ragged_dim: Callable[[torch.Tensor], int] = operator.attrgetter("_ragged_idx")
"""Of a nested tensor: which of its dimensions has other sizes."""

Operator: Any = look_up("_ops.OpOverload")
"""What dispatch modes get, but for operators of higher order."""
schema_of: Callable[[object], torch.FunctionSchema] = operator.attrgetter("_schema")
"""What an operator takes, and which of it it changes."""

EXTRA_STATE: str = look_up("nn.modules.module._EXTRA_STATE_KEY_SUFFIX")
"""The last part of the name under which ``state_dict()`` has what `Module.get_extra_state` returns."""


def saves_more(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``state_dict()`` may have other things than its state and its groups."""
    is_own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    return is_own or bool(_hooks_after_state(optimizer))


function_mode_stack: Callable[[], list[Any]] = look_up("overrides._get_current_function_mode_stack")
dispatch_mode_stack: Callable[[], list[Any]] = look_up("utils._python_dispatch._get_current_dispatch_mode_stack")

push_function_mode: Callable[[object], None] = look_up("overrides._push_mode")
pop_function_mode: Callable[[], object] = look_up("overrides._pop_mode")
push_dispatch_mode: Callable[[object], None] = look_up("utils._python_dispatch._push_mode")
pop_dispatch_mode: Callable[[], object] = look_up("utils._python_dispatch._pop_mode")
count_function_modes: Callable[[], int] = look_up("_C._len_torch_function_stack")
count_dispatch_modes: Callable[[], int] = look_up("_C._len_torch_dispatch_stack")
DisableTorchFunction: Callable[[], AbstractContextManager[None]] = look_up("_C.DisableTorchFunction")
"""``with DisableTorchFunction():`` neither modes nor tensor subclasses see what is done in the block."""

DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[None]] = look_up("_C.DisableTorchFunctionSubclass")
"""The same for tensor subclasses alone."""

DisableTorchDispatch: Callable[[], AbstractContextManager[None]] = look_up("_C._DisableTorchDispatch")
"""``with DisableTorchDispatch():`` neither modes nor tensor subclasses see which operators are called in the block."""

set_grad_enabled: Callable[[bool], None] = look_up("_C._set_grad_enabled")
"""`torch.set_grad_enabled` as a plain function: without the object that a ``with`` block needs."""

is_inside_transform: Callable[[], object] = look_up("_C._functorch.peek_interpreter_stack")
"""Something, or None: whether this thread is in a transform of ``torch.func`` (vmap, grad, jvp …)."""
is_of_transform: Callable[[torch.Tensor], bool] = look_up("_C._functorch.is_functorch_wrapped_tensor")
"""Whether a tensor stands for what a mapping or a gradient of ``torch.func`` has behind it."""

is_any_autocast_enabled: Callable[[], bool] = look_up("_C._is_any_autocast_enabled")

_top_saved_tensor_hooks = look_up("_C._autograd._top_saved_tensors_default_hooks")


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of hooks that ``torch.autograd.graph.saved_tensors_hooks`` has set on this thread."""
    hooks: tuple[Any, Any] | None = _top_saved_tensor_hooks(False)
    return hooks


set_version_counters: Callable[[Sequence[torch.Tensor], Sequence[int]], None] = look_up(
    "_C._autograd._unsafe_set_version_counter"
)
"""Sets ``_version`` of tensors, by which backward tells whether what it saved has been changed in place since."""

raise_on_data_pointer: Callable[[torch.Tensor], None] = look_up("_C._set_throw_on_mutable_data_ptr")
"""From now on whoever asks a tensor without memory for its pointer gets an exception; for good."""

wrapper_of: Callable[..., Any] = look_up("Tensor._make_wrapper_subclass")
"""``wrapper_of(cls, shape, dtype=…)``: a tensor of class ``cls`` without memory."""

ignores_functions: object = look_up("_C._disabled_torch_function_impl")
"""``__torch_function__`` of a class whose tensors are to be treated as plain ones."""

_count_holders: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")


def is_accumulator_kept(leaf: torch.Tensor) -> bool:
    """Whether the program has kept the node where the leaf's gradient is accumulated, as it does for a hook there. Of a
    graph that is alive nobody holds that node's object."""
    if not leaf.requires_grad or _count_holders(leaf) == 1:
        return False
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return sys.getrefcount(node) > 2  # this name, and the argument


swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = look_up("_C._swap_tensor_impl")
"""Exchanges what two tensor objects stand for, on whichever devices; whoever holds the objects sees it."""

_DisableFuncTorch = look_up("_C._DisableFuncTorch")


_tracing_state = look_up("_C._get_tracing_state")
_set_tracing_state = look_up("_C._set_tracing_state")


@contextmanager
def untouched_by_surroundings() -> Iterator[None]:
    """In this block tensors are what they are, whatever modes, traces and transforms of torch.func the calling code is
    in."""
    trace = _tracing_state()
    if trace is not None:
        _set_tracing_state(None)
    try:
        with DisableTorchFunction(), _DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        if trace is not None:
            _set_tracing_state(trace)


_storage_use_count: Callable[[int], int] = look_up("_C._storage_Use_Count")
_place_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
_make_subclass: Callable[[type, torch.Tensor, bool], torch.Tensor] = look_up("Tensor._make_subclass")


def address_of_storage(tensor: torch.Tensor) -> int:
    """By which two tensors are known to share their memory, while one of them is there."""
    return _place_of_storage(tensor.untyped_storage())


def tensors_in_storage(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of ``tensor``, itself among them; those that autograd has saved count too."""
    storage = tensor.untyped_storage()
    return _storage_use_count(_place_of_storage(storage)) - 1  # ``storage`` is one


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory, or parts of it. False for what has none that could be shown."""
    try:
        return address_of_storage(one) == address_of_storage(other)
    except (NotImplementedError, RuntimeError):
        return False


def alias_of(value: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool = False) -> torch.Tensor:
    """A tensor of class ``kind`` over the memory of ``value``, without its history and its attributes."""
    if kind is torch.Tensor:
        return value.detach().requires_grad_(requires_grad)
    return _make_subclass(kind, value.detach(), requires_grad)


_TRANSFORMS_TAKE = (
    ("torch._functorch.eager_transforms", ("_wrap_for_grad", "_wrap_functional_tensor")),
    ("torch._functorch.vmap", ("_add_batch_dim",)),
)
_transforms = {
    (path, name): look_up(name, importlib.import_module(path)) for path, names in _TRANSFORMS_TAKE for name in names
}


_before_transforms: list[Callable[[object], None]] = []


def before_transforms_take(callback: Callable[[Any], None]) -> None:
    """From now on call ``callback(tensor)`` before a transform of torch.func wraps a tensor. It does so without asking
    the tensor's class (``__torch_function__``). For good, in the whole process."""
    _before_transforms.append(callback)
    if len(_before_transforms) > 1:
        return

    def asking(take: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(take)
        def asked(tensor: torch.Tensor, *args: object) -> object:
            for each in _before_transforms:
                each(tensor)
            return take(tensor, *args)

        return asked

    for (path, name), take in _transforms.items():
        setattr(importlib.import_module(path), name, asking(take))


_current_compilation = look_up("CompileContext.current_compile_id", importlib.import_module("torch._guards"))


def is_compiler_at_work() -> bool:
    """Whether PyTorch's compiler traces something right now, so that what comes into being may be its own."""
    return _current_compilation() is not None


def before_compilations(callback: Callable[[], None]) -> None:
    """From now on call ``callback()`` before PyTorch's compiler traces anything, also after `torch.compiler.reset`,
    which forgets what is registered with it. Imports the compiler."""
    handler = look_up("CompilationCallbackHandler", importlib.import_module("torch._dynamo.callback"))
    run = look_up("run_start_callbacks", handler)

    @functools.wraps(run)
    def call_first(self: object, *args: object) -> object:
        callback()
        return run(self, *args)

    handler.run_start_callbacks = call_first


_eval_frame: ModuleType = look_up("_C._dynamo.eval_frame")
_set_eval_frame: Callable[[object], object] = look_up("set_eval_frame", _eval_frame)
_set_strategy: Callable[..., None] = look_up("set_code_exec_strategy", _eval_frame)
_strategy = look_up("_FrameExecStrategy", _eval_frame)
_skip, _default = look_up("_FrameAction.SKIP", _eval_frame), look_up("_FrameAction.DEFAULT", _eval_frame)

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """A decorator: PyTorch's compiler, where it traces or runs what calls ``function``, leaves this and all that it
    calls alone. Unlike `torch.compiler.disable` it costs nothing and does not import the compiler."""
    return _left_alone(function, _skip)


def uncompiled_because(reason: str) -> Callable[[Function], Function]:
    """The same, with what PyTorch says where all has to be compiled (``fullgraph=True``)."""

    def decorate(function: Function) -> Function:
        vars(function).update(_torchdynamo_disable_msg=reason)
        return uncompiled(function)

    return decorate


def _left_alone(function: Function, inner: object) -> Function:
    vars(function).update(_torchdynamo_disable=True)
    _set_strategy(function.__code__, _strategy(_skip, inner))
    return function


class _Uncompiled(dict[str, object]):
    """The keywords of a step that a hook of ours gave, with what compiled until then: gone if the step raises."""

    compiling: object = None


def before_step(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook before an optimizer's step that the compiler leaves alone. Where the hook has another optimizer stepped,
    which is a new one every time, that step is not compiled either."""

    def before(optimizer: object, args: object, kwargs: object) -> object:
        compiling, instead = _set_eval_frame(None), None
        try:
            instead = hook(optimizer, args, kwargs)
        finally:
            if instead is None:
                _set_eval_frame(compiling)
        if instead is None or (paused := getattr(kwargs, "compiling", compiling)) is None:
            return instead
        given = _Uncompiled(instead[1])
        given.compiling = paused
        return instead[0], given

    vars(before).update(_torchdynamo_disable=True)
    return before


def after_step(hook: Callable[..., None]) -> Callable[..., None]:
    """The same of a hook after the step."""

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        compiling = _set_eval_frame(None)
        try:
            hook(optimizer, args, kwargs)
        finally:
            _set_eval_frame(getattr(kwargs, "compiling", compiling))

    vars(after).update(_torchdynamo_disable=True)
    return after


def _make_no_frames_of_these() -> None:
    """They share their code, each with its kind. What they call may be compiled: otherwise the compiler would be at
    their end what it was at their beginning."""
    _left_alone(before_step(print), _default)
    _left_alone(after_step(print), _default)


_make_no_frames_of_these()


def _present(module: str, name: str) -> tuple[ModuleType, str]:
    look_up(f"{module}.{name}")
    return look_up(module), name


parametrization_cache: tuple[ModuleType, str] = _present("nn.utils.parametrize", "_cache")
"""A dictionary that ``with parametrize.cached():`` fills, and another one after it."""

set_by_blocks: tuple[tuple[ModuleType, str], ...] = (
    _present("nn.utils.parametrize", "_cache_enabled"),
    _present("nn.modules.module", "_global_is_full_backward_hook"),
    _present("autograd.graph", "_allow_mutation_on_saved_tensors_enabled"),
)
"""Names in modules of torch that a ``with`` block, or what is undone at its end, sets for the whole process."""

global_module_hooks: tuple[dict[int, object], ...] = tuple(
    look_up(f"nn.modules.module._global_{kind}")
    for kind in (
        "backward_pre_hooks",
        "backward_hooks",
        "forward_pre_hooks",
        "forward_hooks",
        "forward_hooks_always_called",
        "forward_hooks_with_kwargs",
    )
)
"""What ``register_module_forward_hook`` and its like have registered for all modules."""

# Torch's global hooks, by keys that are theirs alone. What `RemovableHandle` does for each of them costs more than all
# the rest of entering and leaving an empty run.
registration_hooks: tuple[dict[int, object], ...] = tuple(
    look_up(f"nn.modules.module._global_{kind}_registration_hooks") for kind in ("parameter", "buffer", "module")
)
_optimizer_module = importlib.import_module("torch.optim.optimizer")  # not to be had as an attribute of torch.optim
optimizer_pre_hooks: dict[int, Any] = look_up("_global_optimizer_pre_hooks", _optimizer_module)
optimizer_post_hooks: dict[int, Any] = look_up("_global_optimizer_post_hooks", _optimizer_module)


_HOOKS_OF_OTHERS = 1 << 48


def number_hooks_apart() -> None:
    """Hooks that come with an object from another process have its numbers: those that are registered here from now on
    get others, and take no other's place."""
    handle: Any = RemovableHandle
    handle.next_id = max(handle.next_id, _HOOKS_OF_OTHERS)


def next_hook_id() -> int:
    """What the next hook gets that is registered on anything."""
    return RemovableHandle.next_id


def new_hook_key() -> int:
    """One that no other hook has, in whichever of the dictionaries above."""
    key: int = torch.utils.hooks.RemovableHandle(optimizer_pre_hooks).id
    return key


_clipping = importlib.import_module("torch.nn.utils.clip_grad")
_group_for_clipping = look_up("_group_tensors_by_device_and_dtype", _clipping)
clipping_hooks: dict[int, Callable[[list[torch.Tensor]], None]] = {}
"""See `put_clipping_hook`."""


def put_clipping_hook(key: int, hook: Callable[[list[torch.Tensor]], None]) -> None:
    """Call ``hook(gradients)`` before torch.nn.utils clips them, or takes their norm to do so. It may put other
    tensors into the list."""
    clipping_hooks[key] = hook
    vars(_clipping)["_group_tensors_by_device_and_dtype"] = _group_after_hooks


def remove_clipping_hook(key: int) -> None:
    clipping_hooks.pop(key, None)


def _group_after_hooks(lists: list[list[torch.Tensor]], *args: object, **kwargs: object) -> Any:
    if clipping_hooks and not torch.compiler.is_compiling():
        for hook in tuple(clipping_hooks.values()):
            hook(lists[0])
    return _group_for_clipping(lists, *args, **kwargs)


# Fused multi-tensor arithmetic: what the optimizers themselves run on.
foreach_add_: Callable[..., None] = look_up("_foreach_add_")
foreach_mul_: Callable[..., None] = look_up("_foreach_mul_")
foreach_copy_: Callable[..., None] = look_up("_foreach_copy_")
foreach_norm: Callable[..., list[torch.Tensor]] = look_up("_foreach_norm")
can_show_memory_of: Callable[..., bool] = look_up("_has_compatible_shallow_copy_type")  # asked before ``data`` is set
foreach_div_: Callable[..., None] = look_up("_foreach_div_")
foreach_zero_: Callable[..., None] = look_up("_foreach_zero_")
unscale_: Callable[..., None] = look_up("_amp_foreach_non_finite_check_and_unscale_")
"""What a gradient scaler does to gradients: looks whether all are finite, and takes the scale out."""


@contextmanager
def optimizers_without_compiler() -> Iterator[None]:
    """In this block, making an optimizer does not import torch's compiler (75 MB, two seconds), which it never uses.

    ``add_param_group`` is made so that a compiled function leaves it alone, and imports the compiler to say so. Without
    that import nothing is compiled. Where torch does it in another way, this changes nothing.
    """
    plain = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    applies = plain is not None and "torch._dynamo" not in sys.modules and not hasattr(plain, _DISABLED)
    if applies:
        setattr(plain, _DISABLED, plain)
    try:
        yield
    finally:
        if applies:
            delattr(plain, _DISABLED)


def step_without_compiler(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` of an optimizer's class without what torch puts around those of its own: profiling, hooks, and a word to
    torch's compiler, which imports it.

    What torch's wrapper also does is up to the caller: gradients are recorded only where ``differentiable`` is set.
    """
    while hasattr(step, "__wrapped__") and step.__globals__["__name__"] == torch.optim.Optimizer.__module__:
        step = step.__wrapped__
    return step


_DISABLED = "__dynamo_disable"


def place_in_checkpoint_file(name: str, offset: int, length: int) -> Any:
    """Where torch.distributed.checkpoint's reader finds an entry: ``length`` bytes at ``offset`` of file ``name``."""
    return class_of_places()(name, offset, length)


def class_of_places() -> Any:
    """Of `place_in_checkpoint_file`."""
    return _of_checkpoints("_StorageInfo")


def checkpoint_version() -> str:
    """What torch.distributed.checkpoint calls the version of the files it writes."""
    version: str = _of_checkpoints("CURRENT_DCP_VERSION")
    return version


def with_metadata(state: Mapping[str, object], metadata: Mapping[str, object]) -> Mapping[str, Any]:
    """A ``state_dict`` whose modules have been of these versions."""
    whole: Any = OrderedDict(state)
    whole._metadata = metadata  # noqa: SLF001
    return whole  # type: ignore[no-any-return]


def store_of_default_group() -> Any:
    """Which torch.distributed's default group has met by."""
    return look_up("distributed.distributed_c10d._get_default_store")()


def _of_checkpoints(name: str) -> Any:
    """Looked up when a checkpoint is written: importing torch.distributed.checkpoint is not free."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401

    return look_up(f"distributed.checkpoint.filesystem.{name}")


_loader_iterator = look_up("utils.data.DataLoader._get_iterator")
_iterator_of: Callable[[type], object] = operator.attrgetter("_get_iterator")


def iterates_as_torch_does(loader: torch.utils.data.DataLoader[object]) -> bool:
    """Whether what a loader hands out follows from its settings; its class, or it, may have an iterator of its own."""
    kind = type(loader)
    is_own = kind.__iter__ is not torch.utils.data.DataLoader.__iter__ or "_get_iterator" in vars(loader)
    return not is_own and _iterator_of(kind) is _loader_iterator


SUM_OF_LOSSES = 2
_index_and_labels: Callable[[object], tuple[int, torch.Tensor]] = operator.attrgetter(
    "_saved_ignore_index", "_saved_target"
)


def reduction_of(node: object) -> int | None:
    """Of a loss of torch, by the node of the graph that stands for it: 0 none, 1 mean, 2 sum. None: no such node."""
    found: int | None = getattr(node, "_saved_reduction", None)
    return found


def ignored_labels(node: object) -> torch.Tensor | None:
    """Which labels a mean over labels leaves out. None: the node is no such mean."""
    if reduction_of(node) != 1 or not hasattr(node, "_saved_ignore_index"):
        return None
    index, labels = _index_and_labels(node)  # unsigned: -100 is 2**64 - 100
    return labels == (index - 2**64 if index >= 2**63 else index)


unpooled_size: Callable[..., list[int]] = look_up("nn.functional._unpool_output_size")

pinned: Callable[[Any], Any] = look_up("utils.data._utils.pin_memory.pin_memory")
"""A copy of a nest of tensors in memory from which an accelerator copies by itself, as a `DataLoader` makes it."""


_KINDS_OF_OPERATORS = tuple(
    look_up(f"_ops.{name}") for name in ("_Ops", "_OpNamespace", "OpOverloadPacket", "OpOverload")
)


def path_of_operator(value: object) -> tuple[str, ...] | None:
    """Which names lead from ``torch.ops`` to a namespace, an operator or an overload of one; None for anything else."""
    if not isinstance(value, _KINDS_OF_OPERATORS):
        return None
    if isinstance(value, ModuleType):
        return tuple(value.__name__.split(".")[2:])
    return tuple(str(value).split("."))


def operator_at(path: Sequence[str]) -> object:
    return functools.reduce(getattr, path, torch.ops)
