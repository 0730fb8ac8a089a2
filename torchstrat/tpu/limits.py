"""What a recorded step cannot do, in words that help: functorch's errors are about functorch."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchstrat.errors import UnsupportedError
from torchstrat.tpu.places import place_of

GLOBAL_VIEW = (
    "run the step with options=ts.RunOptions(global_view=True), where it sees the global batch as one and is not "
    "mapped over replicas"
)


class _Limit(NamedTuple):
    """``pattern``: of functorch's message, with a group for what it is about; ``meaning``: what to tell the user."""

    pattern: str
    meaning: str


_LIMITS = (
    _Limit(
        r"Batching rule not implemented for (\S+?)[.;]? We could not generate a fallback",
        "{0} cannot run for all replicas at once: torch.vmap has no rule for it. Use operations that can, or {view}.",
    ),
    _Limit(
        r"(autograd\.Function) with functorch transforms",
        "the step used a torch.{0} that cannot run for all replicas at once. torch.utils.checkpoint and backward hooks "
        "of modules are made of such functions, too. Give one of your own a setup_context and "
        "generate_vmap_rule = True; else {view}.",
    ),
    _Limit(
        r"(module 'torch' has no attribute 'xla')",
        "torch.utils.checkpoint does not know these devices ({0}); {view}, and use torch_xla's own checkpoint.",
    ),
    _Limit(
        r"(You tried to vmap over \S+)",
        "an operation met a tensor of another replica's shape ({0}); torch.utils.checkpoint, which computes again in "
        "the backward pass, does so. For checkpoints {view}.",
    ),
    _Limit(
        r"(tensor) may have escaped",
        "a {0} was used outside of the run that it belongs to: kept from an earlier run, or computed again by "
        "torch.utils.checkpoint. Return tensors from the step to keep them; for checkpoints {view}.",
    ),
    _Limit(
        r"(?:vmap: )?(\S+)\(self, \*extra_args\) is not possible",
        "{0}, an operation in place, would write what differs between replicas into a tensor that they share. Write it "
        "out of place: total = total + value.",
    ),
    _Limit(
        r"(data-dependent control flow|calling \.item\(\) on a Tensor)",
        "the step needs the value of a tensor ({0}), which is not there before it has been recorded and run. Return "
        "the tensor and read it outside of run, or write the condition with torch.where.",
    ),
    _Limit(
        r"from the '(Sparse\w*)' backend",
        "the step made a sparse tensor ({0}), which these devices do not have. Make embeddings with sparse=False, and "
        "use an optimizer of dense gradients.",
    ),
    _Limit(
        r"(dynamic shapes?|dynamic sizes?)",
        "the step uses an operation whose result has a shape that depends on values ({0}). Keep the shape and mask: "
        "torch.where(condition, value, 0).",
    ),
)


def explained(error: Exception) -> Exception:
    """``error``, which the step raised while it was recorded, or what it means."""
    if type(error) not in (RuntimeError, NotImplementedError, AttributeError):
        return error
    text = str(error)
    for limit in _LIMITS:
        found = re.search(limit.pattern, text)
        if found is not None:
            meaning = limit.meaning.format(found[1], view=GLOBAL_VIEW)
            return UnsupportedError(f"{meaning} It is at {place_of(error)}. (PyTorch said: {text[:200]})")
    return error
