"""Built-in environment to see a policy learn a tool within minutes: a calculator.

    37,45> ▸ policy: 37+45= ▸ calculator: 82> ▸ policy: 82

The policy lets the calculator add and repeats the sum. Set `learner.environment.factory = "calculator"` for
rows of the task `calculator`.
"""

from typing import Any

EQUALS, DISPLAY_END, NO_SUM = "=", ">", " "
"""End of a call, end of its result, and result of an invalid call. tiny:digits knows these characters."""


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


def _share_right(text: str, gold: str) -> float:
    """Return the share of matching characters, relative to the longer text."""
    return sum(one == other for one, other in zip(text, gold, strict=False)) / max(len(text), len(gold))
