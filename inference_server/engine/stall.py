"""Whether an engine that has work gets on with it."""

from collections.abc import Callable

from inference_server.engine.interface import Engine, EngineDead


class StallWatch:
    """To be looked at again and again. Looks at all that the engine does, so requests that wait for others are no stall."""

    def __init__(self, engine: Engine, clock: Callable[[], float], timeout_s: float) -> None:
        """`clock` stands still while nothing may be generated."""
        self._engine, self._clock, self._timeout_s = engine, clock, timeout_s
        self._num_steps, self._moved_at = engine.num_steps, clock()

    def look(self, num_groups: int) -> None:
        """Raises EngineDead when groups are running and the engine has done nothing for too long."""
        num_steps, now = self._engine.num_steps, self._clock()
        if num_groups == 0 or num_steps != self._num_steps:
            self._num_steps, self._moved_at = num_steps, now
        elif now - self._moved_at > self._timeout_s:
            raise EngineDead(
                f"the engine has {num_groups} groups to work on and gave no token for {self._timeout_s:g} s "
                "(server.stall_timeout_s)"
            )
