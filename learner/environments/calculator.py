"""A built-in environment, to see a tool learnt within minutes: a sum that the policy lets a calculator do, and then repeats.

    37,45> ▸ policy: 37+45= ▸ calculator: 82> ▸ policy: 82

Used as `learner.environment.factory = "calculator"` on the rows of the task `calculator`.
"""

from typing import Any

EQUALS, DISPLAY_END, NO_SUM = "=", ">", " "
"""What ends a call, what ends the answer to it, and the answer to a call that is none, in characters that tiny:digits knows."""


class Calculator:
    """`call` and `answer` are columns of the row. The reward is half for the call and half for the answer, each by the share of its
    characters that are right, so that what is nearly right is worth more than noise.
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
        """A turn that ends with an equals sign is a call, whose sum is shown; any other is the answer, and the last."""
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
    """Of the longer one's characters, those that stand at their place in both."""
    return sum(one == other for one, other in zip(text, gold, strict=False)) / max(len(text), len(gold))
