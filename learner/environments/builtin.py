"""Built-in environments to see a policy learn a tool, or several turns, within minutes."""

from typing import Any

EQUALS, DISPLAY_END, NO_SUM = "=", ">", " "
"""Calculator: end of a call, end of its result, and result of an invalid call. tiny:digits knows these characters."""
HIGHER, LOWER, RIGHT, NO_DIGIT = ">", ",", "=", " "
"""Guess: hints. tiny:digits knows these characters."""
NUM_DIGITS = 10


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


class CalculatorByTurn(Calculator):
    """The calculator with a reward for each turn: what the turn adds to the reward of `calculator`."""

    def reset(self, call: str, answer: str, **row: Any) -> None:
        super().reset(call, answer, **row)
        self._display, self._reward = "", 0.0

    def press(self, text: str) -> str:
        self._display = super().press(text)
        return self._display

    def get_turn_reward(self) -> float:
        before, self._reward = self._reward, super().get_reward()
        return self._reward - before

    def get_state_key(self) -> str:
        """Return the text on the display, which is all that the next turn needs."""
        return self._display

    def get_reward(self) -> float:
        """Return what the turns have left out: nothing."""
        return super().get_reward() - self._reward


class GuessByTurn(Guess):
    """The secret digit with a reward for each turn: the share of the digits that the hint rules out.

    The reward of an episode stays that of `guess`: without the right guess, its end takes the rewards of its turns
    back. This is potential-based shaping (Ng et al. 1999), with the share of digits ruled out as the potential.
    """

    def reset(self, secret: int, **row: Any) -> None:
        super().reset(secret, **row)
        self._low, self._high = 0, NUM_DIGITS - 1
        self._ruled_out = 0.0

    def guess(self, text: str) -> str:
        hint = super().guess(text)
        digit = text.strip()[-1:]
        if hint == HIGHER:
            self._low = max(self._low, int(digit) + 1)
        elif hint == LOWER:
            self._high = min(self._high, int(digit) - 1)
        return hint

    def get_turn_reward(self) -> float:
        num_left = 0 if self.done else self._high - self._low + 1
        before, self._ruled_out = self._ruled_out, 1 - num_left / NUM_DIGITS
        return self._ruled_out - before

    def get_state_key(self) -> tuple[int, int]:
        """Return the lowest and the highest digit that the hints leave."""
        return self._low, self._high

    def get_reward(self) -> float:
        """Return what the turns have left out: nothing for a guessed digit, otherwise minus their rewards."""
        return super().get_reward() - self._ruled_out


def _share_right(text: str, gold: str) -> float:
    """Return the share of matching characters, relative to the longer text."""
    return sum(one == other for one, other in zip(text, gold, strict=False)) / max(len(text), len(gold))
