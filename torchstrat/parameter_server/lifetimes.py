"""What the program has dropped, until servers and workers have let go of it, too.

The coordinator holds everything that has a token weakly. What dies is noted with the number of the next function, and
is released when every function below that number has its outcome: none of them can begin, be repeated or come back any
more, and later ones cannot name what was gone before they were scheduled. Tokens are never used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torchstrat.parameter_server.travel.outgoing import Token


class Lifetimes:
    """Of one job's captured objects and variables, by their tokens. Thread-safe."""

    def __init__(self) -> None:
        self._next_function: Callable[[], int] = lambda: 0
        self._on_death: Callable[[], None] = lambda: None
        self._dead: deque[tuple[int, Token]] = deque()
        self._here: deque[Token] = deque()
        self._is_told = False
        self.deaths = 0
        """Another number whenever something has died since."""

    def watch(self, next_function: Callable[[], int], on_death: Callable[[], None]) -> None:
        """``next_function()``: the number of the function that is scheduled next. ``on_death`` is called, in whatever
        thread and with whatever locks held, when there is something to release."""
        self._next_function, self._on_death = next_function, on_death

    def died(self, token: Token) -> None:
        """An object is gone. For the callbacks of weak references, so it takes no lock."""
        self.deaths += 1
        self._here.append(token)
        self._dead.append((self._next_function(), token))
        if not self._is_told:
            self._is_told = True
            self._on_death()

    @property
    def has_dead(self) -> bool:
        """Whether anything waits to be released."""
        return bool(self._dead)

    def take_released(self, ended_below: int) -> tuple[Token, ...]:
        """What no function can name any more, given that those below this number have ended; each once."""
        self._is_told = False  # first: what dies from now on tells again
        dead, taken = self._dead, []
        while dead and dead[0][0] <= ended_below:
            taken.append(dead.popleft()[1])
        return tuple(taken)

    def take_dead(self) -> tuple[Token, ...]:
        """What the coordinator's own tables need not know any more, whether or not functions do; each once."""
        here, taken = self._here, []
        while here:
            taken.append(here.popleft())
        return tuple(taken)
