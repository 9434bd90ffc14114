"""Whether a run fits the server that welcomed it; asked once per connection, before anything is pushed."""

from learner.config import LearnerRun
from learner.data import Prompts
from protocol.errors import ConfigError, DataError
from protocol.messages import Welcome


def check_fits(run: LearnerRun, prompts: Prompts, welcome: Welcome) -> None:
    """Raise ConfigError or DataError when the run asks for what the server does not have."""
    if welcome.dtype != run.dtype:
        raise ConfigError(
            f"the server computes in {welcome.dtype}, this run says dtype = {run.dtype!r}; start both with the same"
        )
    row, num_tokens = prompts.longest()
    max_tokens = run.learner.sampling.max_tokens
    if num_tokens + max_tokens > welcome.max_model_len:
        raise DataError(
            f"the prompt in row {row} has {num_tokens} tokens; with learner.sampling.max_tokens = {max_tokens} that is more "
            f"than the server's {welcome.max_model_len}. Raise server.max_model_len, lower max_tokens or filter the data"
        )
