"""What the sections of the learner's config refuse together: a key that does nothing beside another section's, or that
contradicts it. What a section can tell by itself, it refuses itself. Pure; every refusal names keys, values and the remedy.
"""

from typing import TYPE_CHECKING

from learner.loss_config import BOUNDS
from learner.section import require

if TYPE_CHECKING:
    from learner.config import LearnerConfig

DEFAULT_MAX_REPLACEMENTS = 10


def refuse_contradictions(config: "LearnerConfig") -> None:
    """Raise ValueError for the first contradiction found."""
    _refuse_rewards(config)
    _refuse_rollouts(config)
    _refuse_corrections(config)
    _refuse_references(config)


def _refuse_rewards(config: "LearnerConfig") -> None:
    num_weighted = sum(weight != 0 for weight in config.reward.weight_by_name.values())
    require(
        config.advantage.combine == "sum" or num_weighted > 1,
        f'advantage.combine = "normalize_then_sum" does nothing with {num_weighted} reward function; set it to "sum"',
    )
    require(
        config.kl.place == "loss" or config.advantage.combine == "sum",
        'kl.place = "reward" with advantage.combine = "normalize_then_sum": there is no one reward to take the KL off; '
        'set combine to "sum" or place to "loss"',
    )
    require(
        config.kl.place == "loss" or config.advantage.scale != "group",
        'kl.place = "reward" with advantage.scale = "group": in a group whose rewards are all equal only the KL is left, and '
        'dividing by its own deviation cancels kl.coef; set scale to "batch" or "none", or place to "loss"',
    )


def _refuse_rollouts(config: "LearnerConfig") -> None:
    require(
        not config.push.overlap or config.max_staleness > 0,
        "push.overlap = true with max_staleness = 0: the next step waits for groups of the version that is pushed, so nothing "
        "overlaps; raise max_staleness or set push.overlap = false",
    )
    require(
        config.active_sampling or config.max_replacements == DEFAULT_MAX_REPLACEMENTS,
        f"max_replacements = {config.max_replacements} does nothing without active_sampling = true",
    )
    buffer_tokens, max_tokens = config.reward.overlong_buffer_tokens, config.sampling.max_tokens
    require(
        buffer_tokens is None or buffer_tokens < max_tokens,
        f"reward.overlong_buffer_tokens = {buffer_tokens} must be below sampling.max_tokens = {max_tokens}, else every "
        "completion is penalised",
    )
    name = config.curriculum.reward
    require(
        name is None or name in config.reward.names,
        f"curriculum.reward = {name!r} is none of the reward functions: {', '.join(config.reward.names)}",
    )


def _refuse_corrections(config: "LearnerConfig") -> None:
    correction, objective = config.correction, config.loss.objective
    if correction.anchor == "proximal":
        require(
            objective != "reinforce",
            'correction.anchor = "proximal" does nothing with loss.objective = "reinforce", which has no ratio',
        )
        is_one = correction.proximal == "exact" and config.updates_per_batch == 1
        require(
            not is_one or correction.weight != "none",
            'correction.anchor = "proximal" with updates_per_batch = 1 and correction.weight = "none": the ratio is always 1, so '
            "nothing is clipped or corrected; set correction.weight, raise updates_per_batch or use the behaviour anchor",
        )
        bounds = {bound: value for bound in BOUNDS if (value := getattr(config.loss, bound)) is not None}
        require(
            not is_one or not bounds,
            f"{', '.join(f'loss.{bound} = {value}' for bound, value in bounds.items())} does nothing with correction.anchor = "
            '"proximal" and updates_per_batch = 1: the ratio is always 1',
        )
        require(
            correction.proximal == "exact" or config.max_staleness > 0,
            'correction.proximal = "log_linear" with max_staleness = 0: without stale tokens it is the behaviour policy',
        )
    else:
        require(
            correction.weight != "truncate" or objective == "reinforce",
            f'correction.weight = "truncate" with anchor = "behaviour": the ratio of {objective} is the importance weight '
            'already, and would count twice; set anchor = "proximal", or weight = "mask" to leave tokens out',
        )
    leaves_tokens_out = {
        'correction.weight = "mask" with level = "token"': correction.weight == "mask" and correction.level == "token",
        f"correction.max_token_staleness = {correction.max_token_staleness}": correction.max_token_staleness
        is not None,
        f"loss.top_entropy_frac = {config.loss.top_entropy_frac}": config.loss.top_entropy_frac < 1,
    }
    for key, is_set in leaves_tokens_out.items():
        require(
            objective != "gspo" or not is_set,
            f'{key} with loss.objective = "gspo": its ratio is one of the whole completion, which the tokens left out would '
            'still move; leave out completions (level = "sequence" or "geometric", sequence_mask) or choose another objective',
        )
    require(
        correction.max_token_staleness is None or correction.max_token_staleness < config.max_staleness,
        f"correction.max_token_staleness = {correction.max_token_staleness} does nothing: no token is more than "
        f"max_staleness = {config.max_staleness} versions old",
    )


def _refuse_references(config: "LearnerConfig") -> None:
    has_reference = config.reference.kind != "none"
    require(
        has_reference or not config.kl.is_on,
        f"kl.coef = {config.kl.coef} needs a reference; set reference.kind, or kl.coef to 0",
    )
    require(
        not has_reference or config.kl.is_on,
        f'reference.kind = "{config.reference.kind}" with kl.coef = 0 costs a forward pass and changes nothing; '
        'set kl.coef above 0 or reference.kind to "none"',
    )
    reference = config.reference
    is_policy_itself = reference.kind == "every" and reference.every_steps == 1 and reference.growth is None
    require(
        not is_policy_itself or (config.updates_per_batch > 1 and config.kl.place == "loss"),
        'reference.kind = "every" with every_steps = 1: where its KL is measured, at the start of a step, the reference is the '
        "policy itself and the KL 0; raise every_steps",
    )
    selects = {
        "active_sampling = true": config.active_sampling,
        f'curriculum.kind = "{config.curriculum.kind}"': config.curriculum.kind != "none",
    }
    for key, is_set in selects.items():
        require(
            reference.kind != "adaptive" or not reference.reward_guard or not is_set,
            f"{key} with reference.reward_guard = true: the mean reward of chosen groups falls while the policy improves, so the "
            "reference would never be refreshed; set reward_guard = false",
        )
