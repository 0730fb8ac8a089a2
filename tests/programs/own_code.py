"""Programs as people write them by hand: a small GPT, click models, two networks against each other and the like."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.programs.table import clicks, images, program, tokens, train, vectors


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Its output layer is its table of words."""

    def __init__(self, vocabulary: int = 40, length: int = 7, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _next_word(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


_CUT = {"blocks.0.up.weight": ("d0", None), "blocks.0.up.bias": ("d0",), "blocks.0.down.weight": (None, "d0")}


@program(batches=tokens, rules=_CUT)
def small_gpt() -> Any:
    model = Gpt().double()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _next_word(model, batch[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


@program(batches=tokens)
def small_gpt_with_cosine_rate_by_hand() -> Any:
    model = Gpt(layers=1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = iter((1e-3, 8e-4, 3e-4, 1e-4))

    def step(batch: Any) -> None:
        train(optimizer, _next_word(model, batch[0]))

    def after() -> None:
        for group in optimizer.param_groups:
            group["lr"] = next(rates)

    return {"model": model, "optimizer": optimizer}, step, after


class Clicks(nn.Module):
    """Embeddings of ids and a net on numbers meet in products of pairs."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        first, second = torch.triu_indices(4, 4, offset=1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def _click(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])


@program(batches=clicks)
def click_model() -> Any:
    model = Clicks(sparse=False).double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer}, lambda batch: train(optimizer, _click(model, batch))


@program(batches=clicks)
def click_model_with_sparse_tables() -> Any:
    model = Clicks(sparse=True).double()
    sparse = torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.01)
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=0.01)

    def step(batch: Any) -> None:
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        _click(model, batch).backward()
        for optimizer in (sparse, dense):
            optimizer.step()

    return {"model": model, "sparse": sparse, "dense": dense}, step


@program(batches=clicks)
def wide_and_deep() -> Any:
    wide = nn.EmbeddingBag(20, 1, mode="sum").double()
    deep = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    of_wide = ts.Ftrl(wide.parameters(), lr=0.1, l1=0.01, initial_accumulator_value=0.1)
    of_deep = torch.optim.Adagrad(deep.parameters(), lr=0.05)

    def step(batch: Any) -> None:
        score = (wide(batch[1].flatten(1)) + deep(batch[0])).squeeze(1)
        of_wide.zero_grad()
        of_deep.zero_grad()
        F.binary_cross_entropy_with_logits(score, batch[2]).backward()
        of_wide.step()
        of_deep.step()

    return {"wide": wide, "deep": deep, "of_wide": of_wide, "of_deep": of_deep}, step


@program(batches=tokens)
def word_vectors() -> Any:
    """Neighbours against words that are not, with sparse gradients."""
    inner, outer = (nn.Embedding(40, 6, sparse=True).double() for _ in range(2))
    optimizer = torch.optim.SGD([*inner.parameters(), *outer.parameters()], lr=0.1)

    def step(batch: Any) -> None:
        words, near = batch[0][:, :-1], batch[0][:, 1:]
        right = (inner(words) * outer(near)).sum(-1)
        wrong = (inner(words) * outer((near * 7 + 3) % 40)).sum(-1)
        train(optimizer, -(F.logsigmoid(right) + F.logsigmoid(-wrong)).mean())

    return {"inner": inner, "outer": outer, "optimizer": optimizer}, step


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


@program(batches=vectors)
def two_networks_against_each_other() -> Any:
    makes, judges = _mlp(6, 3), _mlp(3, 1)
    of_makes, of_judges = (torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in (makes, judges))

    def step(batch: Any) -> None:
        drawn, real = batch
        fake = makes(drawn)
        of_judges.zero_grad()
        (F.softplus(-judges(real)).mean() + F.softplus(judges(fake.detach())).mean()).backward()
        of_judges.step()
        of_makes.zero_grad()
        F.softplus(-judges(fake)).mean().backward()
        of_makes.step()

    return {"makes": makes, "judges": judges, "of_makes": of_makes, "of_judges": of_judges}, step


@program(batches=vectors)
def q_learning_with_a_target() -> Any:
    net = _mlp(6, 3)
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, eps=1e-2)

    def step(batch: Any) -> None:
        state, reward = batch
        with torch.no_grad():
            wanted = reward[:, 0] + 0.9 * target(state.flip(1)).max(dim=1).values
        value = net(state).gather(1, (state[:, :1] > 0).long()).squeeze(1)
        train(optimizer, F.smooth_l1_loss(value, wanted))
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.05)

    return {"net": net, "target": target, "optimizer": optimizer}, step


@program(batches=images)
def two_views_and_a_moving_teacher() -> Any:
    student = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6))
    student.double()(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    teacher, guess = copy.deepcopy(student).requires_grad_(False), _mlp(6, 6)
    optimizer = torch.optim.SGD([*student.parameters(), *guess.parameters()], lr=0.05, momentum=0.9)

    def step(batch: Any) -> None:
        one, other = batch[0], batch[0].flip(3)
        loss = 2 - 2 * F.cosine_similarity(guess(student(one)), teacher(other).detach()).mean()
        train(optimizer, loss)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)

    return {"student": student, "teacher": teacher, "guess": guess, "optimizer": optimizer}, step


@program(batches=tokens)
def recurrent_language_model() -> Any:
    words, net, head = nn.Embedding(40, 8), nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 40)
    parts = nn.ModuleList([words, net, head]).double()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        out = head(net(words(batch[0]))[0])
        F.cross_entropy(out[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 0.25)
        optimizer.step()

    return {"parts": parts, "optimizer": optimizer}, step


@program(batches=vectors)
def inner_loop_of_meta_learning() -> Any:
    net = _mlp(6, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def adapted_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of one row: after a step of its own."""

        def loss_of(weights: Any, x: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(net, weights, (x,)), y)

        weights = dict(net.named_parameters())
        slopes = torch.func.grad(loss_of)(weights, x)
        return loss_of({name: w - 0.1 * slopes[name] for name, w in weights.items()}, -x)

    def step(batch: Any) -> None:
        train(optimizer, torch.func.vmap(adapted_loss)(*batch).mean())

    return {"net": net, "optimizer": optimizer}, step
