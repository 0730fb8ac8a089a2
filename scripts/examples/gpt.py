"""A small GPT that learns a text by heart: the Zen of Python, which every Python has.

Run it in one process, or with one replica in each of two:

    python scripts/examples/gpt.py
    torchrun --nproc-per-node 2 scripts/examples/gpt.py

The last line is what the model writes after "Simple is". It is the same either way.
"""

import codecs
import contextlib
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
    import this

TEXT = codecs.decode(this.s, "rot13")
ALPHABET = sorted(set(TEXT))
CONTEXT = 32  # letters


def encode(text):
    return torch.tensor([ALPHABET.index(letter) for letter in text])


class GPT(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, letters):
        """``(rows, length)`` → scores of the next letter ``(rows, length, alphabet)``."""
        length = letters.shape[1]
        x = self.letters(letters) + self.positions.weight[:length]
        return self.head(self.blocks(x, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True))


torch.manual_seed(0)
strategy = ts.MirroredStrategy()
with strategy.scope():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)


def train_step(batch):
    (windows,) = batch
    optimizer.zero_grad()
    scores = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


windows = TensorDataset(encode(TEXT).unfold(0, CONTEXT + 1, 1))
batches = strategy.distribute_dataset(DataLoader(windows, batch_size=64, shuffle=True))
for epoch in range(20):
    for batch in batches:
        losses = strategy.run(train_step, args=(batch,))
    if strategy.is_chief:
        print(f"epoch {epoch}: loss {float(strategy.local_results(losses)[0]):.2f}")

text = "Simple is"
with torch.no_grad():
    while not text.endswith("."):
        text += ALPHABET[model(encode(text[-CONTEXT:])[None])[0, -1].argmax()]
if strategy.is_chief:
    print(text)
strategy.close()
