"""`Strategy`, one final class per file, the registry that names them, and TensorFlow's spellings (``tf_*``).

`policy` is what a strategy of one's own is made of; `estimates` says what a program takes under each before it runs.

Imports from `core`, `data`, `distributed`, `parameter_server`, `replicas` and `sharding`.
"""
