"""The learner's end of an environment's process. `host.py` runs in the process."""

from pathlib import Path
from typing import Any

from learner.config import EnvironmentConfig
from learner.environments.host import ANSWER, Answer, ClassError, Command, Describe, ToolSchemas, serve
from learner.sandbox.process import (
    STARTUP_REMEDY,
    STARTUP_TIMEOUT_S,
    PipeProcess,
    ProcessFailure,
    SandboxLimits,
)
from learner.sandbox.start import fork, run_script
from protocol.errors import ConfigError

OWN_INTERPRETER = Path(__file__).with_name("own_interpreter.py")


class EnvironmentProcess(PipeProcess):
    """A process for one environment. It starts without waiting for the class to load."""

    def __init__(self, config: EnvironmentConfig, *, takes_text: bool) -> None:
        """Start the process.

        Raises:
            ConfigError: If its interpreter cannot be started.
        """
        if config.python is None:
            started = fork("environment", __name__, serve, config.factory, config.tools, takes_text)
        else:
            arguments = (config.factory or "", str(takes_text), *config.tools)
            started = run_script(config.python, OWN_INTERPRETER, *arguments)
        super().__init__(*started, limits_of(config))
        self._is_loaded = False

    def load(self) -> ProcessFailure | None:
        """Wait until the class is loaded, and return the ProcessFailure if that fails."""
        if not self._is_loaded:
            answer = self._checked(self.answer(ANSWER, STARTUP_TIMEOUT_S, STARTUP_REMEDY))
            if isinstance(answer, ProcessFailure):
                return answer
            self._is_loaded = True
        return None

    def command(self, command: Command) -> Answer | ProcessFailure:
        """Send a command and return its answer. The process has ended after a ProcessFailure."""
        failure = self.load()
        if failure is not None:
            return failure
        if isinstance(command, Describe):
            return self._checked(self.ask(command, ANSWER, STARTUP_TIMEOUT_S, STARTUP_REMEDY))
        return self._checked(self.ask(command, ANSWER, self.limits.timeout_s, self.limits.slow_remedy))

    def _checked(self, answer: Answer | ProcessFailure) -> Answer | ProcessFailure:
        if isinstance(answer, ClassError):
            self.kill()
            return ProcessFailure("failed", answer.problem)
        return answer


def limits_of(config: EnvironmentConfig) -> SandboxLimits:
    """Return the limits of a process of an environment or an agent."""
    return SandboxLimits(
        section="learner.environment",
        processes_key="max_concurrent",
        timeout_s=config.timeout_s,
        max_memory_mib=config.max_memory_mib,
    )


def tools_of(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools.

    Raises:
        ConfigError: If the tools cannot be loaded or described.
    """
    process = EnvironmentProcess(config, takes_text=False)
    try:
        answer = process.command(Describe())
    finally:
        process.kill()  # frees what describing has imported
    if isinstance(answer, ProcessFailure):
        raise ConfigError(f"{config.named}: {answer.message}")
    assert isinstance(answer, ToolSchemas)
    return answer.schemas
