"""What programs are drawn from: pieces of source text, by what they are a piece of.

A line of a table here is a piece; its traits say what it cannot go with (`APART`). Simple ones come first, for what
fails is shrunk towards them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tests.matrix import gradient_updates


class Piece(NamedTuple):
    """Lines of a program; ``{i}`` in them is the block's number."""

    text: str = ""
    """Of the place that the table is about: a line of ``forward``, of the step, of what follows a run."""
    init: str = ""
    """Lines of the model's ``__init__``."""
    build: str = ""
    """Lines of ``build`` behind the model."""
    traits: frozenset[str] = frozenset()


def _piece(text: str = "", traits: str = "", *, init: str = "", build: str = "") -> Piece:
    return Piece(text, init, build, frozenset(filter(None, traits.split(", "))))


APART: tuple[tuple[str, str, str], ...] = (
    ("sparse", "dense only", "PyTorch refuses it: not for sparse gradients"),
    ("sparse only", "not sparse", "SparseAdam steps nothing else"),
    ("graph", "changes in backward", "PyTorch refuses it: the second pass needs the values that the first has changed"),
    ("graph", "reentrant", "PyTorch refuses it: reentrant checkpoints cannot be differentiated twice"),
    ("graph", "sparse", "PyTorch has no second derivative of sparse gradients"),
    ("graph", "once differentiable", "PyTorch refuses it: these have no second derivative"),
    ("graph of inputs", "once differentiable", "PyTorch refuses it: these have no second derivative"),
    ("graph of inputs", "reentrant", "PyTorch refuses it: reentrant checkpoints cannot be differentiated twice"),
    ("complex", "not complex", "PyTorch refuses it: complex numbers have no order, and losses are real"),
    ("complex", "flat", "PyTorch refuses it: a buffer of real numbers has no view that is a complex gradient"),
    ("complex", "of real numbers", "PyTorch refuses it: such optimizers, and fused steps, are for real numbers"),
    ("own loss", "summed", "it divides by the rows of a replica"),
    ("scaled", "over", "what was there before would be divided once more"),
    ("graph", "in place", "PyTorch refuses it: what is changed in place is needed for the second pass"),
    ("graph", "summed", "each replica adds the whole penalty to the sum: the program divides it or means another"),
    ("graph", "over", "what the first run leaves hangs in a graph that is gone"),
    ("by hand", "reentrant", "PyTorch refuses it: reentrant checkpoints do not go with torch.autograd.grad"),
    ("by hand", "accumulates", "torch.autograd.grad accumulates nothing, so such hooks are not called"),
    ("by hand", "own update", "the documents say so: what the first replica did with its own gradients counts"),
    ("by hand", "not linear", "the documents say so: such gradients are a replica's own until they are stepped"),
    (
        "by hand of some",
        "adds",
        "a replica that is spared a gradient adds nothing to it: its own affair, as documented",
    ),
    ("graph of some", "watched", "refused by name: replicas come to gradients with graphs in one order, or not at all"),
    ("order by rows", "watched", "refused by name: replicas come to gradients that hooks look at in one order"),
    ("unused by some", "steps in hooks", "refused by name: a replica that is spared a gradient steps nothing there"),
    ("inputs named", "reentrant", "PyTorch refuses it: reentrant checkpoints do not go with backward(inputs=…)"),
    ("pruned", "copies the model", "PyTorch refuses it: what pruning computes is no leaf, and is not copied"),
    ("strided", "as a vector", "PyTorch refuses it: elements in another order have no view"),
    ("strided", "with closure", "PyTorch refuses it: LBFGS takes views of such elements, too"),
    ("counter", "calls twice", "PyTorch refuses it: the second call changes what backward of the first needs"),
    ("by hand", "over", "it assigns gradients, and accumulates none"),
    ("summed by hand", "adds", "each replica adds the whole decay to its own gradient before they are summed"),
    ("shared memory", "in place", "PyTorch itself does to such gradients twice what it does in place"),
    ("shared memory", "accumulates twice", "PyTorch itself adds to such gradients twice"),
    ("flat", "frees", "a freed gradient is no view of the buffer any more"),
    ("flat", "sparse", "a buffer is dense"),
    ("flat", "over", "it begins with a new buffer, and accumulates nothing"),
    ("flat", "changes in backward", "a freed gradient is no view of the buffer any more"),
    (
        "changes in backward",
        "accumulates twice",
        "the second pass is of other weights in part, where graphs are shared",
    ),
    ("changes in backward", "over", "hooks that step accumulate nothing"),
    ("changes in backward", "used twice", "a hook that steps changes what the rest of the pass needs"),
    ("parts of a batch", "whole batch", "parts of a replica's rows are not the parts of the global batch"),
    ("parts of a batch", "each pass", "such a hook does to the gradient of a part what is not the same for the sum"),
    ("parts of a batch", "counter", "a part sees another count than the same rows elsewhere"),
    ("two groups", "one optimizer", "LBFGS has no groups"),
    ("closure", "over", "a closure zeroes and computes afresh"),
    ("closure", "zeroed before", "a closure zeroes and computes afresh"),
    ("no step", "over", "the update belongs to the pass"),
    ("no step", "needs a step", "nothing steps"),
    ("no step", "edits", "the update comes before"),
    ("train()", "frozen norm", "train() would thaw it"),
    ("evaluates", "counter", "evaluation counts as well, on the caller's model alone"),
    ("one optimizer", "many optimizers", "it wants all parameters"),
    ("with closure", "no closure", "LBFGS steps with a closure alone"),
    ("no closure for it", "closure", "its step takes no closure that is called once"),
)
"""Trait, trait, and why no program has both."""


TOGETHER = (
    ("by hand", "summed", "summed by hand"),
    ("by hand", "unused by some", "by hand of some"),
    ("graph", "unused by some", "graph of some"),
    ("used twice", "unused by some", "order by rows"),
)
"""Two traits, and what a program with both has."""


def fits(piece: Piece, traits: Iterable[str]) -> bool:
    """Whether the piece can be in a program that has these traits."""
    have = set(traits)
    return not any(
        (one in have and other in piece.traits) or (other in have and one in piece.traits) for one, other, _ in APART
    )


STEMS: Mapping[str, Piece] = {
    "linear": _piece("h = self.stem(x)", "not sparse", init="self.stem = nn.Linear(6, 6)"),
    "embedding": _piece(
        "h = self.stem(x.abs().mul(10).long() % 12).mean(dim=1)", "not sparse", init="self.stem = nn.Embedding(12, 6)"
    ),
    "sparse embedding": _piece(
        "h = self.stem(x.abs().mul(10).long() % 12).mean(dim=1)",
        "sparse",
        init="self.stem = nn.Embedding(12, 6, sparse=True)",
    ),
    "padded embedding": _piece(
        "h = self.stem(x.abs().mul(10).long() % 12).sum(dim=1)",
        "not sparse",
        init="self.stem = nn.Embedding(12, 6, padding_idx=3)",
    ),
    "bag": _piece(
        "h = self.stem(x.abs().mul(10).long() % 12)",
        "not sparse, once differentiable",
        init='self.stem = nn.EmbeddingBag(12, 6, mode="sum")',
    ),
    "sparse bag": _piece(
        "h = self.stem(x.abs().mul(10).long() % 12)",
        "sparse",
        init='self.stem = nn.EmbeddingBag(12, 6, mode="mean", sparse=True)',
    ),
    "convolution": _piece(
        "h = self.stem(x.view(-1, 1, 2, 3)).flatten(1)[:, :6]",
        "not sparse",
        init="self.stem = nn.Conv2d(1, 2, 2, padding=1)",
    ),
}

BLOCKS: Mapping[str, Piece] = {
    "linear": _piece("h = torch.tanh(self.b{i}(h))", init="self.b{i} = nn.Linear(6, 6)"),
    "residual": _piece("h = h + F.gelu(self.b{i}(h))", init="self.b{i} = nn.Linear(6, 6)"),
    "layer norm": _piece("h = self.b{i}(h)", init="self.b{i} = nn.LayerNorm(6)"),
    "group norm": _piece("h = self.b{i}(h)", init="self.b{i} = nn.GroupNorm(2, 6)"),
    "frozen batch norm": _piece(
        "h = self.b{i}(h)",
        "frozen norm",
        init="self.b{i} = nn.BatchNorm1d(6)\nnn.init.uniform_(self.b{i}.running_var, 0.5, 2.0)",
        build="model.b{i}.eval()",
    ),
    "converted batch norm": _piece(
        "h = self.b{i}(h)",
        "whole batch, two rows, once differentiable, evaluates",
        init="self.b{i} = nn.BatchNorm1d(6)",
        build="ts.convert_sync_batchnorm(model)",
    ),
    "dropout 0": _piece("h = self.b{i}(h)", init="self.b{i} = nn.Dropout(0.0)"),
    "convolution": _piece(
        "h = self.b{i}(h.unsqueeze(1)).mean(dim=1)", init="self.b{i} = nn.Conv1d(1, 2, 3, padding=1)"
    ),
    "tied": _piece(
        "h = self.c{i}(torch.tanh(self.b{i}(h)))",
        "used twice",
        init="self.b{i}, self.c{i} = nn.Linear(6, 6), nn.Linear(6, 6)\nself.c{i}.weight = self.b{i}.weight",
    ),
    "used twice": _piece(
        "h = torch.tanh(self.b{i}(torch.tanh(self.b{i}(h))))", "used twice", init="self.b{i} = nn.Linear(6, 6)"
    ),
    "sum of two": _piece(
        "h = h * (1 + self.p{i} + self.q{i})",
        "shared memory",
        init="self.p{i}, self.q{i} = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))",
    ),
    "frozen": _piece("h = torch.tanh(self.b{i}(h))", init="self.b{i} = nn.Linear(6, 6).requires_grad_(False)"),
    "checkpointed": _piece(
        "h = h + checkpoint(self.b{i}, h, use_reentrant=False)",
        init="self.b{i} = nn.Sequential(nn.Linear(6, 6), nn.Tanh())",
    ),
    "checkpointed, reentrant": _piece(
        "h = h + checkpoint(self.b{i}, h, use_reentrant=True)",
        "reentrant",
        init="self.b{i} = nn.Sequential(nn.Linear(6, 6), nn.Tanh())",
    ),
    "attention": _piece(
        "h = h + self.b{i}(*[h.view(-1, 3, 2)] * 3, need_weights=False)[0].flatten(1)",
        "once differentiable",
        init="self.b{i} = nn.MultiheadAttention(2, 1, batch_first=True)",
    ),
    "recurrent": _piece(
        "h = h + self.b{i}(h.view(-1, 3, 2))[0].flatten(1)",
        "once differentiable, used twice",
        init="self.b{i} = nn.GRU(2, 2, batch_first=True)",
    ),
    "weight norm": _piece(
        "h = torch.tanh(self.b{i}(h))",
        "once differentiable",
        init="self.b{i} = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))",
    ),
    "every other step": _piece(
        "if self.index % 2:\n    h = h + self.b{i}(h)",
        "unused, evaluates",
        init="self.index, self.b{i} = 0, nn.Linear(6, 6)",
    ),
    "counter": _piece(
        "self.calls{i} += 1\nh = h / self.calls{i}",
        "counter",
        init='self.register_buffer("calls{i}", torch.zeros((), dtype=torch.int64))',
    ),
    "spectral norm": _piece(
        "h = torch.tanh(self.b{i}(h))",
        "once differentiable, counter, used twice",
        init="self.b{i} = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))",
    ),
    "symmetric": _piece(
        "h = torch.tanh(self.b{i}(h))",
        "used twice",
        init="class Symmetric(nn.Module):\n    def forward(self, w):\n        return w.triu() + w.triu(1).T\n"
        "self.b{i} = nn.Linear(6, 6)\nnn.utils.parametrize.register_parametrization(self.b{i}, 'weight', Symmetric())",
    ),
    "pruned": _piece(
        "h = torch.tanh(self.b{i}(h))",
        "pruned",
        init="self.b{i} = nn.utils.prune.l1_unstructured(nn.Linear(6, 6), 'weight', 0.5)",
    ),
    "functional_call": _piece(
        "h = h + torch.func.functional_call(self.b{i}, dict(self.b{i}.named_parameters()), h)",
        init="self.b{i} = nn.Linear(6, 6)",
    ),
    "experts": _piece(
        "chosen, mixed = self.g{i}(h).argmax(dim=1), h\n"
        "for number, expert in enumerate(self.b{i}):\n"
        "    rows = (chosen == number).nonzero().squeeze(1)\n"
        "    if len(rows):\n"
        "        mixed = mixed.index_add(0, rows, expert(h[rows]))\n"
        "h = mixed",
        "unused by some",
        init="self.g{i} = nn.Linear(6, 3).requires_grad_(False)\n"
        "self.b{i} = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))",
    ),
    "ensemble": _piece(
        "h = torch.vmap(lambda w: torch.tanh(h @ w))(self.p{i}).mean(dim=0)",
        init="self.p{i} = nn.Parameter(torch.randn(3, 6, 6) / 3)",
    ),
    "detached": _piece("h = h + self.b{i}(h.detach())", init="self.b{i} = nn.Linear(6, 6)"),
    "in place": _piece("h = self.b{i}(h).relu_()", init="self.b{i} = nn.Linear(6, 6)"),
    "saved on the side": _piece(
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):\n"
        "    h = torch.tanh(self.b{i}(h))",
        init="self.b{i} = nn.Linear(6, 6)",
    ),
    "bilinear": _piece("h = torch.tanh(self.b{i}(h, h))", init="self.b{i} = nn.Bilinear(6, 6, 6)"),
    "cell in a loop": _piece(
        "state = (torch.zeros_like(h), torch.zeros_like(h))\n"
        "for _ in range(3):\n"
        "    state = self.b{i}(h, state)\n"
        "h = state[0]",
        "once differentiable, used twice",
        init="self.b{i} = nn.LSTMCell(6, 6)",
    ),
    "transformer": _piece(
        "h = self.b{i}(h.view(-1, 3, 2)).flatten(1)",
        "once differentiable, evaluates",
        init="self.b{i} = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)",
    ),
    "instance norm": _piece(
        "h = self.b{i}(h.view(-1, 2, 3)).flatten(1)",
        "once differentiable",
        init="self.b{i} = nn.InstanceNorm1d(2, affine=True)",
    ),
    "spectrum": _piece(
        "h = h + torch.fft.irfft(torch.fft.rfft(h) * torch.view_as_complex(self.p{i}), n=6)",
        init="self.p{i} = nn.Parameter(torch.randn(4, 2))",
    ),
    "complex": _piece(
        "h = h + (h.to(torch.complex128) @ self.p{i}).real",
        "complex",
        init="self.p{i} = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128) / 6)",
    ),
    "transposed": _piece(
        "h = torch.tanh(h @ self.p{i})", "strided", init="self.p{i} = nn.Parameter(torch.randn(6, 6).t())"
    ),
    "pieces of one": _piece(
        "h = torch.tanh(F.linear(h, self.p{i}[:6], self.p{i}[6])) * self.p{i}.view(-1)[-1]",
        "used twice",
        init="self.p{i} = nn.Parameter(torch.randn(8, 6) / 3)",
    ),
    "scalars in a list": _piece(
        "h = self.p{i}[0] * h + self.p{i}[1] * h.square()",
        init="self.p{i} = nn.ParameterList([torch.ones(()), torch.tensor(0.1)])",
    ),
}

LOSSES: Mapping[str, Piece] = {
    "mean": _piece("return (out - y).square().mean()"),
    "labels": _piece("return F.cross_entropy(out, y.argmax(dim=1))"),
    "targets": _piece("return F.binary_cross_entropy_with_logits(out, y.sigmoid())"),
    "penalty": _piece(
        "return F.huber_loss(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())",
        "used twice, dense only, not complex",
    ),
    "ignored labels": _piece(
        "labels = y.argmax(dim=1)\n"
        'total = F.cross_entropy(out, labels, ignore_index=0, reduction="sum")\n'
        "return ts.global_mean(total, (labels != 0).sum())",
        "whole batch",
    ),
    "contrast": _piece(
        "u, v = ts.get_replica_context().all_gather((F.normalize(out), F.normalize(y)), axis=0)\n"
        "return F.cross_entropy(u @ v.T, torch.arange(len(u)))",
        "whole batch, once differentiable",
    ),
    "sum": _piece("return 0.05 * (out - y).square().sum()", "summed, whole batch"),
    "smoothed labels": _piece("return F.cross_entropy(out, y.argmax(dim=1), label_smoothing=0.1)"),
    "divergence": _piece('return F.kl_div(out.log_softmax(dim=1), y.softmax(dim=1), reduction="batchmean")'),
    "slope at the input": _piece(
        "at = x.detach().requires_grad_()\n"
        "slope = torch.autograd.grad((model(at).sum() + at.sum()), at, create_graph=True)[0]\n"
        "return (out - y).square().mean() + 0.1 * slope.square().sum(dim=1).mean()",
        "graph of inputs, not complex, calls twice",
    ),
    "teacher": _piece(
        "with torch.no_grad():\n    soft = model(x).softmax(dim=1)\n"
        "return F.mse_loss(out, y) + F.mse_loss(out.softmax(dim=1), soft.flip(1))",
        "calls twice",
    ),
}

BACKWARDS: Mapping[str, Piece] = {
    "one": _piece("loss = loss_of(x, y)\nloss.backward()"),
    "several": _piece(
        "loss = loss_of(x, y)\n(loss / 2).backward()\n(loss_of(-x, y) / 3).backward()", "accumulates twice"
    ),
    "retained": _piece(
        "loss = loss_of(x, y)\nloss.backward(retain_graph=True)\n(loss / 4).backward()",
        "accumulates twice, retains",
    ),
    "parts": _piece(
        "for rows in torch.arange(len(x)).chunk(2):\n"
        "    loss = loss_of(x[rows], y[rows]) * len(rows) / len(x)\n"
        "    loss.backward()",
        "accumulates twice, parts of a batch, rows for all",
    ),
    "create_graph": _piece(
        "loss = loss_of(x, y)\n"
        "loss.backward(create_graph=True)\n"
        "(0.1 * sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)).backward()",
        "accumulates twice, graph, not complex",
    ),
    "autograd.grad": _piece(
        "loss = loss_of(x, y)\n"
        "parameters = [p for p in model.parameters() if p.requires_grad]\n"
        "gradients = torch.autograd.grad(loss, parameters, allow_unused=True)\n"
        "for p, gradient in zip(parameters, gradients):\n"
        "    p.grad = gradient",
        "by hand",
    ),
    "flat buffer": _piece(
        "parameters = [p for p in model.parameters() if p.requires_grad]\n"
        "flat = torch.zeros(sum(p.numel() for p in parameters))\n"
        "for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):\n"
        "    p.grad = part.view_as(p)\n"
        "loss = loss_of(x, y)\n"
        "loss.backward()",
        "flat",
    ),
    "by the output's gradient": _piece(
        "out = model(x)\nloss = (out - y).square().mean()\nout.backward(2 * (out - y).detach() / out.numel())",
        "own loss",
    ),
    "of inputs named": _piece(
        "loss = loss_of(x, y)\nloss.backward(inputs=[p for p in model.parameters() if p.requires_grad])", "inputs named"
    ),
    "of a list": _piece(
        "loss = loss_of(x, y)\ntorch.autograd.backward([loss / 2, loss_of(-x, y) / 3])",
        "used twice, accumulates twice, calls twice",
    ),
    "scaled": _piece(
        "loss = loss_of(x, y)\n(loss * 1024).backward()\n"
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad /= 1024",
        "in place, scaled",
    ),
}

HOOKS: Mapping[str, Piece] = {
    "none": _piece(),
    "tensor hooks that scale": _piece(
        traits="watched",
        build="for p in model.parameters():\n    p.requires_grad and p.register_hook(lambda g: g * 0.5)",
    ),
    "tensor hooks that clamp": _piece(
        traits="dense only, once differentiable, each pass, not complex, watched",
        build="for p in model.parameters():\n    p.requires_grad and p.register_hook(lambda g: g.clamp(-0.05, 0.05))",
    ),
    "hooks that clip": _piece(
        traits="accumulates, in place, dense only, changes in backward, each pass",
        build="def clip(p):\n    nn.utils.clip_grad_norm_([p], 0.05)\nfor p in model.parameters():\n"
        "    p.requires_grad and p.register_post_accumulate_grad_hook(clip)",
    ),
    "hooks that edit": _piece(
        traits="accumulates, in place, dense only, changes in backward, each pass",
        build="def edit(p):\n    p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)\nfor p in model.parameters():\n"
        "    p.requires_grad and p.register_post_accumulate_grad_hook(edit)",
    ),
    "a hook that frees": _piece(
        traits="accumulates, frees",
        build='model.head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))',
    ),
    "module hooks": _piece(
        traits="once differentiable",
        build="model.head.register_full_backward_hook(lambda m, inputs, outputs: tuple(i * 0.5 for i in inputs))\n"
        "model.head.register_full_backward_pre_hook(lambda m, outputs: tuple(o * 0.7 for o in outputs))",
    ),
    "forward hook": _piece(build="model.head.register_forward_hook(lambda m, inputs, output: output * 0.9)"),
    "hooks on outputs": _piece(
        build="def scale(m, inputs, output):\n    output.requires_grad and output.register_hook(lambda g: g * 0.7)\n"
        "model.head.register_forward_hook(scale)",
    ),
}

EDITS: Mapping[str, Piece] = {
    "none": _piece(),
    "clip by norm": _piece("nn.utils.clip_grad_norm_(model.parameters(), 0.1)", "dense only, in place, edits"),
    "clip by value": _piece(
        "nn.utils.clip_grad_value_(model.parameters(), 0.02)", "dense only, in place, edits, not complex"
    ),
    "scale": _piece(
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)", "in place, edits"
    ),
    "decay": _piece(
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad = p.grad + 0.01 * p.detach()",
        "dense only, edits, frees, replaces, adds",
    ),
    "centre": _piece(
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.sub_(p.grad.mean())",
        "dense only, in place, edits",
    ),
    "norm of all": _piece(
        "norm = torch.sqrt(sum(p.grad.abs().square().sum() for p in model.parameters() if p.grad is not None))\n"
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad = p.grad / (norm + 1)",
        "dense only, edits, frees, replaces, not linear",
    ),
    "signs": _piece(
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.copy_(torch.tanh(100 * p.grad))",
        "dense only, in place, edits, not complex, not linear",
    ),
    "one left out": _piece("model.head.bias.grad = None", "edits, frees"),
    "all at once": _piece(
        "torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)",
        "dense only, in place, edits",
    ),
}

_ZERO = "    for optimizer in optimizers:\n        optimizer.zero_grad()\n"
UPDATES: Mapping[str, Piece] = {
    "step": _piece("{edits}\nfor optimizer in optimizers:\n    optimizer.step()", "needs a step, no closure"),
    "closure": _piece(
        f"def evaluate():\n{_ZERO}    loss = compute()\n{{indented_edits}}\n"
        "    return loss\nfor optimizer in optimizers:\n    optimizer.step(evaluate)",
        "closure, needs a step",
    ),
    "closure that returns None": _piece(
        f"def evaluate():\n{_ZERO}    compute()\n{{indented_edits}}\n"
        "for optimizer in optimizers:\n    optimizer.step(evaluate)",
        "closure, needs a step, no closure",
    ),
    "by hand": _piece(
        "{edits}\nwith torch.no_grad():\n    for p in model.parameters():\n        if p.grad is not None:\n"
        "            p.add_(p.grad, alpha=-0.1)\n            p.grad = None",
        "no step, no closure, own update",
    ),
    "in hooks": _piece(
        "",
        "no step, accumulates, changes in backward, frees, no closure, each pass, steps in hooks",
        build="def hook(p):\n    steppers[p].step()\n    steppers[p].zero_grad()\n"
        "steppers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}\n"
        "for p in steppers:\n    p.register_post_accumulate_grad_hook(hook)",
    ),
}

_DENSE = {
    "Adam": "torch.optim.Adam({p}, lr={rate})",
    "AdamW": "torch.optim.AdamW({p}, lr={rate}, amsgrad=True)",
    "Adam, foreach": "torch.optim.Adam({p}, lr={rate}, foreach=True, weight_decay=0.1)",
    "Adagrad": "torch.optim.Adagrad({p}, lr={rate}, initial_accumulator_value=0.1)",
    "RMSprop": "torch.optim.RMSprop({p}, lr={rate}, momentum=0.5, centered=True, eps=1e-3)",
    "Adadelta": "torch.optim.Adadelta({p}, lr=0.5)",
    "Adamax": "torch.optim.Adamax({p}, lr={rate})",
    "Rprop": "torch.optim.Rprop({p}, lr={rate})",
    "NAdam": "torch.optim.NAdam({p}, lr={rate})",
    "RAdam": "torch.optim.RAdam({p}, lr={rate})",
    "ASGD": "torch.optim.ASGD({p}, lr={rate})",
}
_DENSE_AND_REAL = {
    "AdamW, fused": "torch.optim.AdamW({p}, lr={rate}, fused=True)",
    "Adafactor": "torch.optim.Adafactor({p}, lr={rate})",
    "Ftrl": "ts.Ftrl({p}, lr={rate}, l1=0.001, l2=0.1, initial_accumulator_value=0.1)",
}
OPTIMIZERS: Mapping[str, Piece] = {
    "SGD": _piece("torch.optim.SGD({p}, lr={rate})"),
    "SGD, momentum": _piece(
        "torch.optim.SGD({p}, lr={rate}, momentum=0.9, nesterov=True, weight_decay=0.01)", "dense only"
    ),
    **{name: _piece(text, "dense only") for name, text in _DENSE.items()},
    **{name: _piece(text, "dense only, of real numbers") for name, text in _DENSE_AND_REAL.items()},
    "LBFGS": _piece("torch.optim.LBFGS({p}, lr=0.1, max_iter=3)", "dense only, one optimizer, with closure"),
    "Lookahead": _piece("Lookahead(torch.optim.SGD({p}, lr={rate}))", "wrapper, no closure for it"),
    "Decaying": _piece("Decaying({p}, lr={rate})", "wrapper"),
}
CLASSES = {name: inspect.getsource(getattr(gradient_updates, name)) for name in ("Lookahead", "Decaying")}

GROUPS: Mapping[str, Piece] = {
    "one": _piece("optimizers = [{whole}]"),
    "two rates": _piece("optimizers = [{groups}]", "two groups"),
    "two optimizers": _piece("optimizers = [{first}, {second}]", "many optimizers"),
    "frozen left out": _piece("optimizers = [{trained}]"),
    "added later": _piece(
        'optimizers = [{started}]\noptimizers[0].add_param_group({"params": [*model.parameters()][-1:], "lr": 0.02})',
        "two groups",
    ),
}

ZEROS: Mapping[str, Piece] = {
    "after": _piece("optimizer.zero_grad()"),
    "before": _piece("optimizer.zero_grad()", "zeroed before"),
    "in place": _piece("optimizer.zero_grad(set_to_none=False)", "in place, zeroed in place"),
    "model.zero_grad": _piece("model.zero_grad()"),
}

SCHEDULES: Mapping[str, Piece] = {
    "none": _piece(),
    "in the step": _piece(
        'program["scheduler"].step()',
        "needs a step, scheduled in step",
        build='program["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)',
    ),
    "between": _piece(
        'program["scheduler"].step()',
        "needs a step, scheduled between",
        build='program["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 5)',
    ),
    "lambda, between": _piece(
        'program["scheduler"].step()',
        "needs a step, scheduled between",
        build='program["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda n: 1 / (1 + n))',
    ),
    "warmed up": _piece(
        'program["scheduler"].step()',
        "needs a step, scheduled in step",
        build="optimizer = optimizers[0]\n"
        'program["scheduler"] = torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR('
        "optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])",
    ),
    "one cycle": _piece(
        'program["scheduler"].step()',
        "needs a step, scheduled between, dense only",
        build='program["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=20, '
        "cycle_momentum=False)",
    ),
}

_LERP = """\
with torch.no_grad():
    for a, p in zip(program["{copy}"].parameters(), model.parameters()):
        a.lerp_(p, 0.1)"""
AFTER: Mapping[str, Piece] = {
    "nothing": _piece(),
    "average": _piece(
        'program["average"].update_parameters(model)',
        "copies the model",
        build='program["average"] = torch.optim.swa_utils.AveragedModel(model)',
    ),
    "average by hand": _piece(
        _LERP.replace("{copy}", "average"),
        "copies the model",
        build='program["average"] = copy.deepcopy(model).requires_grad_(False)',
    ),
    "weights clamped": _piece("with torch.no_grad():\n    model.head.weight.clamp_(-0.3, 0.3)"),
    "weights decayed": _piece("with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.99)"),
    "weights clamped by step hooks": _piece(
        traits="needs a step",
        build="def clamp(*_):\n    with torch.no_grad():\n        model.head.weight.clamp_(-0.3, 0.3)\n"
        "for optimizer in optimizers:\n    optimizer.register_step_post_hook(clamp)",
    ),
    "weights set through data": _piece("model.head.weight.data = model.head.weight.data * 0.9"),
    "weights as a vector": _piece(
        "trained = [p for p in model.parameters() if not p.is_complex()]\n"
        "with torch.no_grad():\n"
        "    nn.utils.vector_to_parameters(0.99 * nn.utils.parameters_to_vector(trained), trained)",
        "as a vector",
    ),
}

BETWEEN: Mapping[str, Piece] = {
    "nothing": _piece(),
    "evaluate": _piece(
        "model.eval()\nwith torch.no_grad():\n    model(torch.ones(2, 6))\nmodel.train()", "train(), evaluates"
    ),
    "average": _piece(
        _LERP.replace("{copy}", "tracked"),
        "copies the model",
        build='program["tracked"] = copy.deepcopy(model).requires_grad_(False)',
    ),
    "weights edited": _piece("with torch.no_grad():\n    model.head.weight.mul_(0.9)"),
    "load state": _piece(
        "if index == 1:\n    model.load_state_dict({name: v * 1 for name, v in model.state_dict().items()})"
    ),
    "rate set": _piece('for optimizer in optimizers:\n    optimizer.param_groups[0]["lr"] *= 0.9', "needs a step"),
    "states saved and loaded": _piece(
        "saved = copy.deepcopy([one.state_dict() for one in (model, *optimizers)])\n"
        "for one, state in zip((model, *optimizers), saved):\n    one.load_state_dict(state)"
    ),
    "average swapped in": _piece(
        "kept = {name: p.detach().clone() for name, p in model.named_parameters()}\n"
        "with torch.no_grad():\n"
        "    for p in model.parameters():\n        p.mul_(0.5)\n"
        "    for name, p in model.named_parameters():\n        p.copy_(kept[name])"
    ),
    "frozen later": _piece("if index == 1:\n    model.head.bias.requires_grad_(False)"),
    "a layer anew": _piece("if index == 1:\n    torch.manual_seed(7)\n    model.head.reset_parameters()"),
    "state forgotten": _piece("if index == 1:\n    for optimizer in optimizers:\n        optimizer.state.clear()"),
    "weights set through data": _piece("model.head.bias.data = model.head.bias.data * 0.9"),
}
