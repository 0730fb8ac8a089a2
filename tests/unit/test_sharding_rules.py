"""Rules by parameter name: which one decides, what they make, and what is an error before anything is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.grid import Sharding
from torchstrat.sharding.rules import ShardingRules


def test_a_model_is_cut_by_name() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    rules = ShardingRules({"*linear1.weight": ("d0", None), "*linear2.weight": (None, "d0")}, (4,))
    cut = {name: rules.sharding_for(name, own.shape) for name, own in model.named_parameters()}
    assert cut.pop("linear1.weight") == Sharding((4,), (("d0",), ()))
    assert cut.pop("linear2.weight") == Sharding((4,), ((), ("d0",)))
    assert cut
    assert all(own.is_replicated for own in cut.values())
    assert [own.rank for own in cut.values()] == [own.ndim for name, own in model.named_parameters() if name in cut]
    rules.require_all_used()


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*.weight", "a.b.weight", True),
        ("*.weight", "weight", False),
        ("*.weight", "a.weights", False),
        ("layers.?.weight", "layers.7.weight", True),
        ("layers.?.weight", "layers.10.weight", False),
        ("layers.[0-3].weight", "layers.2.weight", True),
        ("layers.[0-3].weight", "layers.4.weight", False),
        ("Layer.weight", "layer.weight", False),
        ("weight", "weight", True),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert ShardingRules({pattern: ("d0",)}, (2,)).sharding_for(name, (4,)).is_replicated is not matches


def test_the_first_rule_that_matches_decides() -> None:
    rules = ShardingRules({"head.weight": None, "*.weight": ("d0", None)}, (2,))
    assert rules.sharding_for("head.weight", (3, 3)).is_replicated
    assert rules.sharding_for("body.weight", (4, 3)) == Sharding((2,), (("d0",), ()))
    assert rules.unused() == []


def test_a_rule_behind_a_more_general_one_is_reported() -> None:
    rules = ShardingRules({"*.weight": ("d0", None), "head.weight": None}, (2,))
    assert rules.sharding_for("head.weight", (2, 3)) == Sharding((2,), (("d0",), ()))
    assert rules.unused() == ["head.weight"]
    with pytest.raises(InvalidArgumentError, match=r"(?s)'head.weight' comes too late.*head.weight.*'\*.weight'"):
        rules.require_all_used()


def test_a_rule_that_matches_nothing_is_reported_with_similar_names() -> None:
    rules = ShardingRules({"*.liner1.weight": ("d0", None), "*.bias": ("d0",)}, (2,))
    for name, shape in {"a.linear1.weight": (4, 4), "a.linear1.bias": (4,), "norm": (4,)}.items():
        rules.sharding_for(name, shape)
    assert rules.unused() == ["*.liner1.weight"]
    with pytest.raises(InvalidArgumentError) as caught:
        rules.require_all_used()
    assert "'*.liner1.weight' matches no parameter's name; the most similar are a.linear1.weight" in str(caught.value)
    assert "bias'" not in str(caught.value)


def test_all_rules_are_unused_before_a_name_is_asked_for() -> None:
    rules = ShardingRules({"a": ("d0",)}, (2,))
    assert rules.unused() == ["a"]
    with pytest.raises(InvalidArgumentError, match="no name has been asked for"):
        rules.require_all_used()


def test_several_axes() -> None:
    rules = ShardingRules({"a": [None, ("d1", "d0")], "b": [["d0"], "d1"], "c": ((), None)}, [2, 3])
    assert rules.axis_sizes == (2, 3)
    assert rules.sharding_for("a", (5, 6)) == Sharding((2, 3), ((), ("d1", "d0")))
    assert rules.sharding_for("b", (2, 3)) == Sharding((2, 3), (("d0",), ("d1",)))
    assert rules.sharding_for("c", (5, 5)).is_replicated


def test_an_axis_of_one_device_cuts_nothing() -> None:
    """So one set of rules serves any number of logical devices."""
    assert ShardingRules({"a": ("d0",)}, (1,)).sharding_for("a", (7,)).is_replicated


def test_none_for_a_rule_fits_any_rank() -> None:
    rules = ShardingRules({"*": None}, (2,))
    assert [rules.sharding_for("a", (3,) * rank).spec for rank in range(3)] == [(), ((),), ((), ())]


def test_an_empty_dimension_divides() -> None:
    assert ShardingRules({"a": ("d0",)}, (2,)).sharding_for("a", (0,)).parts(1) == (2,)


@pytest.mark.parametrize(
    ("entries", "shape", "message"),
    [
        (("d0",), (4, 4), r"'a\*' is \('d0',\), and abc has the shape \(4, 4\): .* differ, 1 and 2"),
        (("d0", None), (), r"is \('d0', None\), and abc has the shape \(\): .* differ, 2 and 0"),
        ((None, "d0"), (4, 5), r"'a\*' cuts dimension 1 of abc \(4, 5\) into 2 equal parts along d0; 5 does not"),
        ((("d0", "d1"), None), (8, 4), r"into 6 equal parts along d0, d1; 8 does not divide by 6"),
    ],
)
def test_a_rule_that_does_not_fit_the_tensor(entries: Any, shape: tuple[int, ...], message: str) -> None:
    rules = ShardingRules({"a*": entries}, (2, 3))
    with pytest.raises(InvalidArgumentError, match=message):
        rules.sharding_for("abc", torch.Size(shape))


@pytest.mark.parametrize(
    ("entries", "kind", "message"),
    [
        ("d0", WrongTypeError, "one entry per dimension"),
        (3, WrongTypeError, "one entry per dimension"),
        ({"d0"}, WrongTypeError, "one entry per dimension"),
        ((None, 2), WrongTypeError, "entry 1 is int 2"),
        (((1,), None), WrongTypeError, "entry 0 is tuple"),
        (("d2",), InvalidArgumentError, r"axis 'd2'; there is 'd0' \(size 2\), 'd1' \(size 3\)"),
        (("rows",), InvalidArgumentError, "axis 'rows'"),
        (("replica",), InvalidArgumentError, "every replica has the whole parameter"),
        (("d0", "d0"), InvalidArgumentError, r"\('d0', 'd0'\) uses d0 more than once"),
        ((("d0", "d1"), "d1"), InvalidArgumentError, r"\(\('d0', 'd1'\), 'd1'\) uses d1 more than once"),
    ],
)
def test_a_malformed_rule_names_its_pattern(entries: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"sharding rule '\*.w': .*{message}"):
        ShardingRules({"*.w": entries}, (2, 3))


@pytest.mark.parametrize("rules", [[("a", None)], "a", None])
def test_rules_are_a_mapping(rules: Any) -> None:
    with pytest.raises(WrongTypeError, match="a mapping from patterns"):
        ShardingRules(rules, (2,))


def test_patterns_are_text() -> None:
    with pytest.raises(WrongTypeError, match="is text; got int 1"):
        ShardingRules({1: ("d0",)}, (2,))  # type: ignore[dict-item]


@pytest.mark.parametrize(("sizes", "kind"), [((), InvalidArgumentError), ((2, 0), InvalidArgumentError),
                                             ((2.0,), WrongTypeError), (4, WrongTypeError)])  # fmt: skip
def test_sizes_of_axes(sizes: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="axis_sizes"):
        ShardingRules({}, sizes)


def test_repr() -> None:
    assert repr(ShardingRules({"a": None}, (2, 3))) == "<ShardingRules ['a'] over d0=2, d1=3>"
