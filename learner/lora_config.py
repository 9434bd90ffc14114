"""The config of the low-rank adapter that may be trained in place of the whole model."""

from typing import Literal

from learner.section import Section, require


class LoraConfig(Section):
    """A low-rank adapter as the policy. It has no dropout: the server samples without, so every ratio would be noise."""

    rank: int = 0
    """0: train the whole model; above: train rank · (inputs + outputs) numbers for each adapted layer, which wants about ten
    times the learning rate."""
    alpha: float = 32.0
    """The adapter counts alpha / rank, so that one learning rate suits every rank (arXiv 2106.09685)."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The linear layers that are adapted, by the end of their names, as `q_proj v_proj`; all-linear: all but the LM head."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"rank = {self.rank} must not be negative; 0 trains the whole model")
        for key, default in (("alpha", 32.0), ("target_modules", "all-linear")):
            value = getattr(self, key)
            require(
                self.rank > 0 or value == default,
                f"{key} = {value!r} does nothing with rank = 0, which trains the whole model; set rank or remove it",
            )
        require(self.alpha > 0, f"alpha = {self.alpha} must be above 0")
        require(
            len(self.target_modules) > 0,
            'target_modules = [] adapts nothing; name layers or set it to "all-linear"',
        )
