"""When a checkpoint is written, what is in it, and which of them stay."""

from learner.config.section import Section, require
from protocol.config import MayChange

TRAINING_REWARD, EVALUATION = "training_reward", "evaluation"


class CheckpointConfig(Section):
    """Checkpoints."""

    every_steps: MayChange[int] = 50
    """Steps between checkpoints; one is always written at the end."""
    keep_last: MayChange[int] = 2
    """How many of the newest checkpoints stay, 0: all; a resume goes on from the newest, or, when newer ones are removed by
    hand, from any of these. While one is written there is one more."""
    keep_best: MayChange[int] = 1
    """Of so many of the best (`best_by`) the `model/` stays, however old, without what only a resume needs; `best.json` beside it has
    the reward."""
    best_by: MayChange[str] = "training_reward"
    """The best have the highest mean reward over the steps that led to them, or ("evaluation"; "evaluation/NAME" of several sets) at
    the evaluation after their step."""
    export_model: MayChange[bool] = True
    """Also write the policy into each checkpoint as `model/`, in the run's dtype and with the adapter merged, for `vllm serve`
    and `from_pretrained`."""

    timeout_s: MayChange[float] = 1800.0
    """How long a checkpoint may take in all. It is written while training goes on; the next one and the end of the run wait
    for it."""

    def lacking(self) -> dict[str, str]:
        idle = {} if self.keep_best else {"best_by": "keep_best above 0"}
        return idle if self.export_model else idle | {"keep_best": "export_model = true"}

    @property
    def judging_set(self) -> str | None:
        """Of several sets that are evaluated, the one that tells which are the best."""
        return self.best_by.removeprefix(EVALUATION).removeprefix("/") or None if self.is_by_evaluation else None

    @property
    def is_by_evaluation(self) -> bool:
        return self.best_by != TRAINING_REWARD

    def check(self) -> None:
        require(
            self.best_by in (TRAINING_REWARD, EVALUATION) or self.best_by.startswith(f"{EVALUATION}/"),
            f'best_by = "{self.best_by}" came; expected "{TRAINING_REWARD}", "{EVALUATION}", or of several sets "{EVALUATION}/NAME"',
        )
        require(self.every_steps >= 1, f"every_steps = {self.every_steps} must be at least 1")
        require(self.timeout_s > 0, f"timeout_s = {self.timeout_s} must be above 0")
        for key in ("keep_last", "keep_best"):
            require(getattr(self, key) >= 0, f"{key} = {getattr(self, key)} must not be negative")
