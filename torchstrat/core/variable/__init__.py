"""`ts.Variable`: state that is neither parameter nor buffer, and what assigning to it means on several replicas.

`variable` is the class, `storage` where a component is kept and where a strategy's variables live, `tensor_like` what
lets one stand in PyTorch's functions. On parameter servers a component is kept elsewhere
(`torchstrat.parameter_server`).

Imports from `core`.
"""
