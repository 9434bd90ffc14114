"""Whether an engine that has work gets on with it."""

from collections.abc import Callable

from inference_server.engine.interface import Engine, EngineDead


class StallWatch:
    """To be looked at again and again. Looks at all that the engine does, so requests that wait for others are no stall."""

    def __init__(self, engine: Engine, clock: Callable[[], float], timeout_s: float) -> None:
        """`clock` stands still while nothing may be generated."""
        self._engine, self._clock, self._timeout_s = engine, clock, timeout_s
        self._moved: dict[int, tuple[int | None, float]] = {}
        """By replica: its steps when they were last seen to change, and when that was."""

    def look(self, num_groups: int) -> None:
        """Raises EngineDead when groups are running and a replica that has requests has done nothing for too long."""
        now, steps = self._clock(), self._engine.num_steps
        for replica, num_steps in enumerate(steps):
            before, moved_at = self._moved.get(replica, (None, now))
            if num_groups == 0 or num_steps is None or num_steps != before:
                self._moved[replica] = (num_steps, now)
            elif now - moved_at > self._timeout_s:
                who = "" if len(steps) == 1 else f", replica {replica} has requests"
                raise EngineDead(
                    f"the engine has {num_groups} groups to work on{who} and gave no token for {self._timeout_s:g} s "
                    "(server.stall_timeout_s)"
                )
