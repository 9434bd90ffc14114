"""Built-in environment to see several turns train within minutes: guess a digit.

The policy has four turns and gets a hint for each guess. Binary search finds any of ten digits in four turns.
Set `learner.environment.factory = "guess"` for rows of the task `guess`.
"""

from typing import Any

HIGHER, LOWER, RIGHT, NO_DIGIT = ">", ",", "=", " "
"""Hints. tiny:digits knows these characters."""


class Guess:
    """Environment with a secret digit. `secret` is a column of the row.

    The reward is 1 if the policy guessed the digit, else 0.
    """

    def __init__(self) -> None:
        self.done = False
        self._secret = 0

    def reset(self, secret: int, **row: Any) -> None:
        self.done, self._secret = False, secret

    def guess(self, text: str) -> str:
        """Return whether the secret is higher, lower or found, or the guess has no digit."""
        digit = text.strip()[-1:]
        if not digit.isdecimal():
            return NO_DIGIT
        self.done = int(digit) == self._secret
        return RIGHT if self.done else HIGHER if self._secret > int(digit) else LOWER

    def get_reward(self) -> float:
        return float(self.done)
