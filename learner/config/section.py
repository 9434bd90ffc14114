"""A section of the learner's config: what every one of them is, and how it refuses a value."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the learner's sections."""


def require(condition: bool, problem: str) -> None:
    """Raise ValueError, which the loader turns into a ConfigError with the section's name."""
    if not condition:
        raise ValueError(problem)
