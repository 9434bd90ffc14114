"""Built-in environments to see a policy learn a tool, or several turns, within minutes."""

from typing import Any

EQUALS, DISPLAY_END, NO_SUM = "=", ">", " "
"""Calculator: end of a call, end of its result, and result of an invalid call. tiny:digits knows these characters."""
HIGHER, LOWER, RIGHT, NO_DIGIT = ">", ",", "=", " "
"""Guess: hints. tiny:digits knows these characters."""


class Calculator:
    """Environment that adds two numbers. `call` and `answer` are columns of the row.

    The reward is half for the call and half for the answer. Each half is the share of correct characters, so
    that a near miss is worth more than noise.
    """

    def __init__(self) -> None:
        self.done = False
        self._call = self._answer = ""
        self._share_of_call = self._share_of_answer = 0.0

    def reset(self, call: str, answer: str, **row: Any) -> None:
        self.done = False
        self._call, self._answer = call, answer
        self._share_of_call = self._share_of_answer = 0.0

    def press(self, text: str) -> str:
        """Add the numbers of a call, which is a turn that ends with an equals sign.

        Any other turn is the answer and ends the episode.
        """
        if not text.endswith(EQUALS):
            self.done = True
            self._share_of_answer = _share_right(text, self._answer)
            return ""
        self._share_of_call = _share_right(text, self._call)
        numbers = text.removesuffix(EQUALS).split("+")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            return NO_SUM
        return f"{sum(map(int, numbers))}{DISPLAY_END}"

    def get_reward(self) -> float:
        return (self._share_of_call + self._share_of_answer) / 2


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


def _share_right(text: str, gold: str) -> float:
    """Return the share of matching characters, relative to the longer text."""
    return sum(one == other for one, other in zip(text, gold, strict=False)) / max(len(text), len(gold))
