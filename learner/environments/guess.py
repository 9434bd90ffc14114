"""A built-in environment, to see several turns learn within minutes: guess a digit in four turns, by what is said of each guess.

Binary search finds any of ten digits in four. Used as `learner.environment.factory = "guess"` on the rows of the task `guess`.
"""

from typing import Any

HIGHER, LOWER, RIGHT, NO_DIGIT = ">", ",", "=", " "
"""What is said, in characters that tiny:digits knows."""


class Guess:
    """`secret` is a column of the row. The reward is 1 if it was guessed, else 0."""

    def __init__(self) -> None:
        self.done = False
        self._secret = 0

    def reset(self, secret: int, **row: Any) -> None:
        self.done, self._secret = False, secret

    def guess(self, text: str) -> str:
        """Say whether the secret is higher or lower than the digit that came, or that none came."""
        digit = text.strip()[-1:]
        if not digit.isdecimal():
            return NO_DIGIT
        self.done = int(digit) == self._secret
        return RIGHT if self.done else HIGHER if self._secret > int(digit) else LOWER

    def get_reward(self) -> float:
        return float(self.done)
