"""Programs in the idiom of other libraries' documents, on small models with random weights, under every strategy.

They need ``pip install -e .[programs]``; those whose library is not there are skipped. ``./scripts/soak programs`` runs
them. A program is a function that builds its parts and returns them with its step: see `table`.
"""
