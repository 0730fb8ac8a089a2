"""Initialisers recorded on meta tensors, and replayed on the shards of a table."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.parameter_server.messages import InitialOp
from torchstrat.parameter_server.variables.initial_values import RecordInitialisers, recipe_of, replay

ROWS, WIDTH = 2000, 50

INITIALISERS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal_": lambda t: nn.init.normal_(t, 0.5, 0.1),
    "uniform_": lambda t: nn.init.uniform_(t, -0.2, 0.7),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, 0.1, 0.5, -0.3, 0.9),
    "trunc_normal_, far tails": lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, 1.0, 1.5),
    "xavier_uniform_": lambda t: nn.init.xavier_uniform_(t, gain=2.0),
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal_": lambda t: nn.init.kaiming_normal_(t, mode="fan_out"),
    "constant_": lambda t: nn.init.constant_(t, 0.25),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "normal_, clamped": lambda t: t.data.normal_().mul_(0.5).add_(1).clamp_(min=0.2, max=1.5),
    "erfinv_": lambda t: t.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.3 * 2**0.5).add_(0.1),
    "exponential_": lambda t: t.data.exponential_(2.0),
    "bernoulli_": lambda t: t.data.bernoulli_(0.3),
    "divided and shifted": lambda t: t.data.normal_().div_(4).sub_(0.5),
}

BOUNDED = ("uniform", "trunc", "const", "ones", "zeros", "clamped", "bernoulli")


def recorded(initialise: Callable[[torch.Tensor], object], *shape: int) -> nn.Parameter:
    with RecordInitialisers():
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        initialise(parameter)
    return parameter


def replayed(parameter: torch.Tensor, shards: int = 1, seed: int = 7) -> torch.Tensor:
    recipe = pickle.loads(pickle.dumps(recipe_of(parameter, "table")))
    rows = parameter.shape[0]
    cuts = [rows * part // shards for part in range(shards + 1)]
    return torch.cat(
        [
            replay(recipe, (j - i, *parameter.shape[1:]), parameter.dtype, seed, i, rows)
            for i, j in itertools.pairwise(cuts)
        ]
    )


@pytest.mark.filterwarnings("ignore:mean is more than 2 std:UserWarning")
@pytest.mark.parametrize("name", INITIALISERS)
def test_the_distribution_is_the_initialisers_whatever_the_number_of_shards(name: str) -> None:
    torch.manual_seed(3)
    plain = torch.empty(ROWS, WIDTH)
    INITIALISERS[name](plain)
    parameter = recorded(INITIALISERS[name], ROWS, WIDTH)
    got = replayed(parameter, shards=3)
    assert got.shape == plain.shape
    # Two samples of 100,000: the Kolmogorov-Smirnov distance stays below 0.0102 but once in 30,000 seeds.
    grid = torch.quantile(plain.flatten(), torch.linspace(0, 1, 501))
    below = [torch.searchsorted(sample.flatten().sort().values, grid, right=True) for sample in (plain, got)]
    assert int((below[0] - below[1]).abs().max()) < 0.0102 * plain.numel()
    # Mean and variance within six standard errors of their difference.
    error = 6 * plain.std() * (2 / plain.numel()) ** 0.5 + 1e-7
    assert abs(plain.mean() - got.mean()) <= error
    assert abs(plain.std() - got.std()) <= 2 * error
    if any(word in name for word in BOUNDED):
        torch.testing.assert_close(got.aminmax(), plain.aminmax(), rtol=0.0, atol=1e-3)
    assert all(torch.equal(got, replayed(parameter, shards)) for shards in (1, 2, 5, 7))


def test_blocks_and_seeds_differ_and_the_global_generator_is_left_alone() -> None:
    parameter = recorded(nn.init.normal_, 5000, WIDTH)
    before = torch.get_rng_state()
    one, other, again = (replayed(parameter, seed=seed) for seed in (1, 2, 1))
    assert len(torch.unique(one[:, 0])) == 5000
    assert abs(float((one * other).mean())) < 0.01
    assert torch.equal(one, again)
    replayed(recorded(nn.init.trunc_normal_, 50, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("padding", [0, 3, -1])
def test_an_embeddings_padding_row(padding: int) -> None:
    with RecordInitialisers():
        table = nn.Embedding(10, 4, padding_idx=padding, device="meta")
    assert recipe_of(table.weight)[-1] == InitialOp("fill_", (0,), {}, padding % 10)
    for shards in (1, 5):
        zero_rows = (replayed(table.weight, shards) == 0).all(dim=1).nonzero().flatten().tolist()
        assert zero_rows == [padding % 10]


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w[2].zero_(),
        lambda w: w.data[2:4].fill_(0.0),
        lambda w: w.data.__setitem__(2, 0.0),
        lambda w: w.data.__setitem__(slice(2, 4), torch.zeros(2, 4, device="meta")),
        lambda w: w.data[2].mul_(0),
    ],
)
def test_rows_written_apart(write: Callable[[torch.Tensor], object]) -> None:
    with RecordInitialisers(), torch.no_grad():
        weight = nn.Parameter(torch.empty(10, 4, device="meta").normal_())
        write(weight)
    got = replayed(weight, 2)
    assert (got[2] == 0).all()
    assert (got[4:] != 0).all()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(3, 2, device="meta"), 0.0),
        (lambda: torch.ones(3, 2, device="meta"), 1.0),
        (lambda: torch.full((3, 2), 2.5, device="meta"), 2.5),
        (lambda: torch.zeros(3, 2, device="meta") + 1.5, 1.5),
        (lambda: torch.ones_like(torch.empty(3, 2, device="meta")).mul(3.0).sub(1.0), 2.0),
        (lambda: torch.full_like(torch.empty(3, 2, device="meta"), 4.0).clone(), 4.0),
        (lambda: torch.empty(3, 2, device="meta").normal_().fill_(5.0), 5.0),
        (lambda: nn.Linear(2, 3, device="meta").weight.new_full((3, 2), 6.0), 6.0),
    ],
)
def test_factories_and_what_is_computed_from_them(make: Callable[[], torch.Tensor], expected: float) -> None:
    with RecordInitialisers():
        tensor = make()
    assert torch.equal(replayed(nn.Parameter(tensor), 3), torch.full((3, 2), expected))


def test_random_factories() -> None:
    with RecordInitialisers():
        normal, uniform = torch.randn(400, 9, device="meta") * 0.02 + 1, torch.rand(400, 9, device="meta")
    assert abs(float(replayed(normal).std()) - 0.02) < 0.002
    assert 0.9 < float(replayed(normal).mean()) < 1.1
    assert 0.0 <= float(replayed(uniform).min()) < 0.01 < 0.99 < float(replayed(uniform).max()) <= 1.0


def test_a_whole_model_and_its_deep_copy() -> None:
    with RecordInitialisers():
        model = nn.Sequential(nn.Embedding(20, 8, device="meta"), nn.Linear(8, 4, device="meta"))
        norm = nn.LayerNorm(4, device="meta")
        twin = copy.deepcopy(model)
    for tensor in (*model.parameters(), *twin.parameters(), *norm.parameters()):
        assert replayed(tensor).isfinite().all()
    assert float(replayed(twin[1].weight).abs().max()) <= 1 / 8**0.5
    assert torch.equal(replayed(norm.weight), torch.ones(4))


def test_fan_in_is_the_whole_tables() -> None:
    got = replayed(recorded(nn.init.xavier_uniform_, 1000, 10), 5)
    assert 0.9 < float(got.abs().max()) / (6 / 1010) ** 0.5 <= 1.0


def test_scalars_other_dtypes_and_a_shard_without_rows() -> None:
    with RecordInitialisers():
        scalar = torch.empty((), device="meta").uniform_(2, 3)
        counter = torch.zeros(3, dtype=torch.int64, device="meta")
        half = torch.empty(40, 3, dtype=torch.bfloat16, device="meta").normal_()
    assert 2 <= float(replay(recipe_of(scalar), (), torch.float32, 0, 0, 1)) <= 3
    assert replayed(counter).dtype == torch.int64
    assert replayed(half, 2).dtype == torch.bfloat16
    assert replay((InitialOp("zero_", ()),), (0, 4), torch.float32, 0, 3, 5).shape == (0, 4)


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (nn.init.orthogonal_, "(orthogonal_|copy_)"),  # torch skips these on meta since 2.13 or so, and tried before
        (lambda w: nn.init.sparse_(w, 0.1), "(sparse_|index_put_)"),
        (nn.init.eye_, r"eye\(out=\)"),
        (lambda w: w.data.copy_(torch.zeros(200, 4)), "copy_"),
        (lambda w: w.data[:, 1].fill_(0), "fill_ on a part of it that is not made of whole rows"),
        (lambda w: w.data[1, 2].fill_(0), "fill_ on a part of it that is not made of whole rows"),
        (lambda w: w.data[:100].zero_(), r"(fill_|zero_) on 100 of its 200 rows; at most 64"),
        (lambda w: w.data.add_(torch.ones(4, device="meta")), "add_"),
        (lambda w: w.data.index_fill_(0, torch.tensor([1], device="meta"), 0.0), "index_fill_"),
        (lambda w: torch._foreach_mul_([w.data], torch.ones((), device="meta")), "_foreach_mul_"),
    ],
)
def test_what_cannot_be_repeated_on_a_shard(write: Callable[[torch.Tensor], object], what: str) -> None:
    with RecordInitialisers():
        layer = nn.Linear(4, 200, device="meta")
        write(layer.weight)
    with pytest.raises(UnsupportedError, match=f"rnn.weight, made on meta, was written by {what}.*make it on the CPU"):
        recipe_of(layer.weight, "rnn.weight")
    with RecordInitialisers():
        nn.init.normal_(layer.weight)
    assert recipe_of(layer.weight)[0].name == "normal_"


def test_nothing_has_filled_it() -> None:
    empty = torch.empty(3, device="meta")

    def stop() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), RecordInitialisers():
        stop()
    outside = nn.init.trunc_normal_(torch.empty(3, 2, device="meta").normal_())
    for tensor, says in (
        (nn.Parameter(empty), r"emb\.weight, made on meta, has no initial value"),
        (outside, "has no initial value"),  # nothing is recorded any more
        (nn.Linear(2, 2).to("meta").weight, "loses its values"),
        (torch.zeros(3), "is on cpu, not on meta"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            recipe_of(tensor, "emb.weight")
    with pytest.raises(InvalidArgumentError, match="'set_', which is no known initialiser"):
        replay((InitialOp("set_", ()),), (3,), torch.float32, 0, 0, 3, "table")


def test_an_imported_trunc_normal_is_recorded_too() -> None:
    from torch.nn.init import trunc_normal_

    assert float(replayed(recorded(lambda t: trunc_normal_(t, std=0.02), 10, 3)).abs().max()) < 0.2


def test_what_was_recorded_goes_with_the_tensor() -> None:
    parameter = recorded(nn.init.ones_, 10, 3)
    noted = weakref.ref(parameter.untyped_storage()._torchstrat_initialisers)
    view = parameter[2]
    del parameter
    gc.collect()
    assert noted() is not None
    assert view.shape == (3,)
    del view
    gc.collect()
    assert noted() is None
