"""What every backend shares, and what needs no other process: errors, nests, values, contexts, reductions, `Variable`.

Also what a step is found to touch (`reachable`, `gradients`), the one classification of optimizers
(`optimizers`), what a program takes in memory (`memory`), and the private names of PyTorch (`_torch_private`).
All other folders import from here.

Imports from no other folder.
"""
