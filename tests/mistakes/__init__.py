"""The table of mistakes: what people do wrong on their first days, and what they see.

``python -m tests.mistakes`` prints it as Markdown; ``tests/unit/test_mistakes.py`` makes each mistake and reads the
message. A message says what was given, what was needed and what to change. A mistake that raises nothing is there too,
with the reason why that is right.
"""
