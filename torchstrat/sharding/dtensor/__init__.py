"""Replicas of several logical devices, one process each, on `torch.distributed.tensor`.

What a step cuts is a `CutTensor`, a DTensor that knows only operators which are proven equal to plain PyTorch; what it
does not cut stays a plain tensor, whole on every logical device. Reading order: `devices`, `cut_tensors`,
`operators`, `parameters`, `engine`.

Imports from `core`, `distributed`, `replicas` and `sharding`.
"""
