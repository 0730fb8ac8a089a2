"""Batches as detection has them: images of different sizes, each with its own number of objects.

Run it in one process, or with one replica in each of two:

    python scripts/examples/detection.py
    torchrun --nproc-per-node 2 scripts/examples/detection.py

The last line says how far the centres that the net finds are from the true ones. It is the same either way: lists are
split by `ts.data.examples`, and a mean over objects, of which replicas have different numbers, is `ts.global_mean`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import torchstrat as ts

STRIDE = 4  # pixels of a cell, of which each says where in it a centre is, if there is one


def image_with_squares(number):
    """An image ``(1, height, width)`` and the centres of its squares ``(objects, 2)``, no two of them in one cell."""
    random = torch.Generator().manual_seed(number)
    height, width = (int(size) for size in torch.randint(6, 10, (2,), generator=random))  # in cells
    objects = int(torch.randint(1, 5, (1,), generator=random))
    cells = torch.randperm(height * width, generator=random)[:objects]
    corners = torch.stack([cells // width, cells % width], dim=1) * STRIDE
    centres = corners + torch.randint(0, STRIDE, (objects, 2), generator=random)
    image = torch.zeros(1, height * STRIDE, width * STRIDE)
    for row, column in centres.tolist():
        image[0, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] += 1.0
    return image, centres


def collate(rows):
    images, centres = zip(*rows, strict=True)
    return ts.data.examples(images), ts.data.examples(centres)


torch.manual_seed(0)
strategy = ts.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 32, STRIDE, STRIDE), nn.ReLU(), nn.Conv2d(32, 2, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def distances(batch):
    """From each true centre to the one that the net finds in its cell, in pixels: ``(objects,)``."""
    found, true = [], []
    for image, centres in zip(*batch, strict=True):
        row, column = (centres // STRIDE).unbind(dim=1)
        found.append(model(image)[:, row, column].T)
        true.append((centres % STRIDE).float())
    return (torch.cat(found) - torch.cat(true)).norm(dim=1)


def train_step(batch):
    optimizer.zero_grad()
    errors = distances(batch)
    loss = ts.global_mean(errors.sum(), len(errors))
    loss.backward()
    optimizer.step()
    return loss.detach()


data = [image_with_squares(number) for number in range(512)]
batches = strategy.distribute_dataset(DataLoader(data, batch_size=32, collate_fn=collate))
for epoch in range(10):
    for batch in batches:
        losses = strategy.run(train_step, args=(batch,))
    if strategy.is_chief:
        print(f"epoch {epoch}: loss {float(strategy.local_results(losses)[0]):.3f}")
held_out = zip(*[image_with_squares(number) for number in range(1_000, 1_032)], strict=True)
if strategy.is_chief:
    with torch.no_grad():
        print(f"centres are {float(distances(held_out).mean()):.1f} pixels off")
strategy.close()
