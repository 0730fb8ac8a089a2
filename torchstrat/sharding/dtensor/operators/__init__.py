"""The operators that are proven equal to plain PyTorch on tensors that are cut; see `rules` for how one is written.

Each file has the operators of one kind; one that is not here is refused by name. What is proven of each stands in
`tests/dtensor`.

Imports from `core` and `sharding/dtensor`.
"""

from torchstrat.sharding.dtensor.operators import contraction, data_attribute, elementwise, losses, reductions
from torchstrat.sharding.dtensor.operators.rules import apply, operators, with_stand_ins

_RULES = (contraction, data_attribute, elementwise, losses, reductions)
"""Each registers its own when it is imported."""

__all__ = ["apply", "operators", "with_stand_ins"]
