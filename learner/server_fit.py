"""Whether a server fits a run, by what its Welcome says. The controller asks before the first weight sync to it."""

from learner.policy.rope import check_server_rope
from learner.run_inputs import RunInputs
from learner.servers.membership import Member
from learner.servers.parity import check_dtype
from learner.servers.quantization import check_joiner
from protocol.channel.sockets import MAX_SERVER_FRAME_BYTES
from protocol.errors import ConfigError, DataError, ServerLost
from protocol.messages import RoutingShape, Welcome


def check_fits(run_inputs: RunInputs, member: Member, *, is_quantized: bool | None) -> None:
    """Raise an error unless the server fits the run and its off-policy correction (see check_joiner).

    Raises:
        ConfigError: The config requires something that the server does not have.
        DataError: The longest prompt does not fit the server's context.
        ServerLost: The server is not connected.
    """
    run, welcome = run_inputs.run, member.welcome
    if welcome is None:
        raise ServerLost(f"the server at {member.endpoint} disconnected before it was checked")
    check_dtype(run, member, welcome)
    check_server_rope(
        run_inputs.model_config, run.server.get("max_model_len"), welcome.max_model_len, endpoint=member.endpoint
    )
    check_experts(run_inputs.experts, member.endpoint, welcome)
    max_episode_tokens = run.learner.environment.max_episode_tokens or 0
    if max_episode_tokens > welcome.max_model_len:
        raise ConfigError(
            f"learner.environment.max_episode_tokens = {max_episode_tokens} is more than max_model_len = "
            f"{welcome.max_model_len} of the server at {member.endpoint}; lower it, or raise server.max_model_len"
        )
    row, num_tokens = run_inputs.prompts.longest()
    max_tokens = run.learner.sampling.max_tokens
    if num_tokens + max_tokens > welcome.max_model_len:
        raise DataError(
            f"the prompt in row {row} has {num_tokens} tokens; with learner.sampling.max_tokens = {max_tokens}, this "
            f"is more than max_model_len = {welcome.max_model_len} of the server at {member.endpoint}. Raise "
            "server.max_model_len, lower learner.sampling.max_tokens, or filter the data"
        )
    check_joiner(run, member, is_quantized=is_quantized)


def check_experts(expected: RoutingShape | None, endpoint: str, welcome: Welcome) -> None:
    """Raise ConfigError unless a server can return the routed experts that the run replays, if it replays any."""
    if expected is None:
        return
    if welcome.experts != expected:
        raise ConfigError(
            f"learner.routing_replay = true, but the server at {endpoint} returns "
            f"{welcome.experts or 'no routed experts'}, expected {expected}; set server.return_routed_experts = true "
            "there, or learner.routing_replay = false"
        )
    if (num_bytes := expected.bytes_per_token * welcome.max_model_len) > MAX_SERVER_FRAME_BYTES:
        raise ConfigError(
            f"learner.routing_replay = true with max_model_len = {welcome.max_model_len} of the server at {endpoint}: "
            f"the routed experts of one completion may have {num_bytes >> 20} MiB, expected at most "
            f"{MAX_SERVER_FRAME_BYTES >> 20}; lower server.max_model_len to "
            f"{MAX_SERVER_FRAME_BYTES // expected.bytes_per_token}"
        )
