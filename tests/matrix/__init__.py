"""Tables that enumerate what a program may do, and what comes of it under every strategy.

One file a table. A table has a line per row and a line per column and generates its cells from them; a cell runs in a
place (a strategy with its launch) and is *right* (plain PyTorch on one device), *refused* (an error of ours that names
the thing and the remedy), *documented* (a difference that is agreed on, and warned of where it can be seen), or *open*
(known to be wrong, by number: a strict expected failure).
::

    python -m tests.matrix                 all tables as Markdown
    python -m tests.matrix state           one of them
    python -m tests.matrix --faults        the planted faults, and which cell has to catch each

Read `table` first, then one of the tables. `places` has the strategies and their launches, `catalog` the tables' names.
A new table is one file with a ``TABLE`` and a line in `catalog`; a new row is a line in its file.
"""
