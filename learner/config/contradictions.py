"""Checks across sections of the config: keys without effect, and keys that contradict each other."""

from typing import TYPE_CHECKING

from learner.config.evaluation import EvaluationConfig
from learner.config.objectives import BOUNDS, is_plug_in
from learner.config.rewards import OF_ENVIRONMENT
from learner.config.section import refuse

if TYPE_CHECKING:
    from learner.config.learner import LearnerConfig


def unmet_requirements(config: "LearnerConfig") -> dict[str, str]:
    """Return what each key needs from another section to have an effect."""
    correction = config.off_policy_correction
    unmet_needs: dict[str, str] = {}
    if not config.dynamic_sampling:
        unmet_needs |= dict.fromkeys(("max_resamples", "signal_reward"), "dynamic_sampling = true")
    if config.max_staleness != "auto":
        unmet_needs["max_auto_staleness"] = 'max_staleness = "auto"'
    if config.max_staleness == 0:  # the next step needs groups of the new version
        unmet_needs["weight_sync.overlap_with_training"] = "max_staleness above 0"
    if not config.reward.functions:
        unmet_needs |= dict.fromkeys(
            ("curriculum.kind", "reward.only_logged", "checkpoint.keep_best"), "reward.functions"
        )
    if not config.reward.is_learned_from:
        keys = ("baseline", "scale", "combine", "credit", "function")
        unmet_needs |= dict.fromkeys((f"advantage.{key}" for key in keys), "rewards to learn from")
    elif sum(weight != 0 for weight in config.reward.weight_by_name.values()) < 2:
        unmet_needs["advantage.combine"] = "two reward functions of nonzero weight"
    if not config.environment.is_used:  # a completion is one turn
        unmet_needs["advantage.credit"] = "environment.factory, tools, agent or command"
    if not config.lora.rank:
        unmet_needs["weight_sync.lora"] = "lora.rank above 0"
    if not config.kl.is_on:
        unmet_needs["reference.kind"] = "kl.coef above 0"
    if correction.max_token_staleness is not None and correction.max_token_staleness >= config.staleness_bound:
        unmet_needs["off_policy_correction.max_token_staleness"] = (
            f"max_staleness above {correction.max_token_staleness}"
        )
    if not _has_dataset(config.evaluation, config):
        unmet_needs["evaluation.dataset_config"] = "dataset"
        if not any(one.dataset for one in config.evaluation.sets.values()):  # sets inherit only the split
            unmet_needs["evaluation.split"] = "dataset"
    if correction.anchor_used == "proximal":
        if config.loss.has_ratio is False:
            unmet_needs["off_policy_correction.anchor"] = "an objective with a ratio"
        elif correction.proximal == "log_linear" and config.max_staleness == 0:  # equals the behavior policy
            unmet_needs |= dict.fromkeys(
                ("off_policy_correction.anchor", "off_policy_correction.weight"), "max_staleness above 0"
            )
        elif is_plug_in(config.loss.objective):  # its use of the bounds is unknown
            pass
        elif correction.proximal == "exact" and config.updates_per_batch == 1:  # the ratio is always 1
            of_ratio = set(BOUNDS) - (
                {"cov_frac", "cov_low", "cov_high"} if config.loss.objective == "clip_cov" else set()
            )
            unmet_needs |= {f"loss.{bound}": "updates_per_batch above 1" for bound in sorted(of_ratio)}
    return unmet_needs


def _has_dataset(evaluation: EvaluationConfig, config: "LearnerConfig") -> bool:
    """Return whether an evaluation's prompts are of a dataset: its own, or that of the run."""
    has_other = evaluation.task is not None or evaluation.path is not None
    return evaluation.dataset is not None or (not has_other and config.data.dataset is not None)


def check_contradictions(config: "LearnerConfig") -> None:
    """Raise ValueError for the first contradiction between keys that have an effect."""
    _check_reward_needs(config)
    _check_kl_advantage(config)
    _check_kl_reward(config)
    _check_credit(config)
    _check_rewards(config)
    _check_corrections(config)
    _check_references(config)
    _check_evaluations(config)
    refuse(
        config.routing_replay and config.compile is True,
        "routing_replay = true with compile = true: compiled layers choose their experts themselves; set compile to "
        '"auto" or false',
    )


def _check_reward_needs(config: "LearnerConfig") -> None:
    reward = config.reward
    nothing = "reward.only_logged = true" if reward.functions else "reward.functions = []"
    refuse(
        not reward.is_learned_from and not config.kl.is_advantage,
        f"{nothing} leaves nothing to learn from; reward with a function, or distill from a reference with "
        'kl.place = "advantage"',
    )
    needs_functions = {
        f"evaluation.every_steps = {config.evaluation.every_steps}": config.evaluation.every_steps > 0,
        f"reward.overlong_buffer_tokens = {reward.overlong_buffer_tokens}": reward.overlong_buffer_tokens is not None,
    }
    for key, is_used in needs_functions.items():
        refuse(
            is_used and not reward.functions,
            f"{key} needs a reward function; add one to reward.functions, with reward.only_logged = true to learn from "
            "the reference alone",
        )


def _check_kl_advantage(config: "LearnerConfig") -> None:
    """Check what does not go with a KL as the advantage of each token."""
    if not config.kl.is_advantage:
        return
    correction, loss = config.off_policy_correction, config.loss
    refuse(
        config.dynamic_sampling,
        'dynamic_sampling = true with kl.place = "advantage": every group has a signal, the KL of its tokens; set '
        "dynamic_sampling = false",
    )
    refuse(
        correction.sequence_mask is not None,
        f"off_policy_correction.sequence_mask = {correction.sequence_mask} with kl.place = "
        '"advantage": each token has its own advantage, so no completion has a negative one; unset sequence_mask',
    )
    refuse(
        correction.weighted_completions == "negative",
        'off_policy_correction.weighted_completions = "negative" with kl.place = "advantage": each token has its own '
        'advantage, so no completion has a negative one; set it to "all"',
    )
    refuse(
        loss.is_of_completion or loss.objective in ("clip_cov", "kl_cov"),
        f'kl.place = "advantage" with loss.objective = "{loss.objective}", whose ratio or choice of tokens needs '
        "one advantage for the whole completion, but each token has its own; choose another objective",
    )


def _check_kl_reward(config: "LearnerConfig") -> None:
    """Check what does not go with penalties that lower the reward: the KL, or overlong completions."""
    kl, advantage, overlong = config.kl, config.advantage, config.reward.overlong_buffer_tokens
    refuse(
        kl.place == "reward" and advantage.combine != "sum",
        'kl.place = "reward" with advantage.combine = "normalize_then_sum": the KL cannot be subtracted from several '
        'rewards; set combine to "sum" or place to "loss"',
    )
    refuse(
        kl.place == "reward" and advantage.scale == "group" and advantage.function is None,
        'kl.place = "reward" with advantage.scale = "group": in a group whose rewards are all equal, only the KL '
        'differs, and dividing by its deviation cancels kl.coef; set scale to "batch" or "none", or place to "loss"',
    )
    lowers_rewards = {
        'kl.place = "reward"': kl.is_on and kl.place == "reward",
        f"reward.overlong_buffer_tokens = {overlong}": overlong is not None,
    }
    for key, is_set in lowers_rewards.items():
        refuse(
            is_set and advantage.scale == "mean" and advantage.function is None,
            f'{key} with advantage.scale = "mean": a penalty makes rewards negative, and a mean near 0 would then '
            'divide them; set scale to "batch" or "none", or remove the penalty',
        )


def _check_credit(config: "LearnerConfig") -> None:
    """Check what does not go with advantages by turn."""
    advantage, loss = config.advantage, config.loss
    if advantage.credit == "episode":
        return
    refuse(
        advantage.scale == "mean",
        f'advantage.credit = "{advantage.credit}" with advantage.scale = "mean": what a turn and later ones earn '
        'has no group mean to be divided by; set scale to "group", "batch" or "none", or credit to "episode"',
    )
    refuse(
        advantage.combine != "sum",
        f'advantage.credit = "{advantage.credit}" with advantage.combine = "normalize_then_sum": the rewards of '
        "turns belong to one function, and the advantages of the others have no turns to be added to; set combine to "
        '"sum", or credit to "episode"',
    )
    refuse(
        loss.is_of_completion,
        f'advantage.credit = "{advantage.credit}" with loss.objective = "{loss.objective}": its ratio '
        "covers the whole completion, so it would spread the advantage of each turn over all of them; choose another "
        'objective, or set credit to "episode"',
    )


def _check_rewards(config: "LearnerConfig") -> None:
    reward, environment, max_tokens = config.reward, config.environment, config.sampling.max_tokens
    buffer_tokens = reward.overlong_buffer_tokens
    refuse(
        buffer_tokens is not None and buffer_tokens >= max_tokens,
        f"reward.overlong_buffer_tokens = {buffer_tokens} must be below sampling.max_tokens = {max_tokens}; otherwise "
        "every completion is penalized",
    )
    refuse(
        buffer_tokens is not None and environment.is_used,
        f"reward.overlong_buffer_tokens = {buffer_tokens} with {environment.named}: turns and tokens limit an "
        "episode, not sampling.max_tokens; unset reward.overlong_buffer_tokens",
    )
    refuse(
        OF_ENVIRONMENT in reward.functions and environment.factory is None and not environment.has_agent,
        'reward.functions contains "environment_reward", which only environments and agents return; set '
        "environment.factory, agent or command",
    )
    for key, name in {"curriculum.reward": config.curriculum.reward, "signal_reward": config.signal_reward}.items():
        refuse(
            name is not None and name not in reward.names,
            f"{key} = {name!r} is not a reward function of this run; use one of: {', '.join(reward.names)}",
        )


def _check_corrections(config: "LearnerConfig") -> None:
    correction, loss = config.off_policy_correction, config.loss
    is_proximal = correction.anchor_used == "proximal"
    refuse(
        is_proximal and loss.objective == "vespo",
        'off_policy_correction.anchor = "proximal" with loss.objective = "vespo": vespo weighs a completion by its '
        'whole ratio to the policy that sampled it; set anchor = "behavior"',
    )
    is_one = correction.proximal == "exact" and config.updates_per_batch == 1
    refuse(
        is_proximal and is_one and correction.weight_used == "none",
        'off_policy_correction.anchor = "proximal" with updates_per_batch = 1 and off_policy_correction.weight = '
        '"none": the ratio is always 1, so nothing is clipped or corrected; set off_policy_correction.weight, '
        'raise updates_per_batch, or set off_policy_correction.anchor = "behavior"',
    )
    remedy = 'weight = "none"' if loss.objective == "vespo" else 'anchor = "proximal"'
    mask = 'with granularity = "sequence" to exclude completions' if loss.is_of_completion else "to exclude tokens"
    refuse(
        not is_proximal and correction.weight_used == "truncate" and loss.has_ratio is True,
        f'off_policy_correction.weight = "truncate" with anchor = "behavior": the ratio of {loss.objective} already is '
        f'the importance weight, which would count twice; set {remedy}, or weight = "mask" {mask}',
    )
    is_token_mask = correction.weight_used == "mask" and correction.granularity == "token"
    max_binary_kl, max_staleness = correction.max_binary_kl, correction.max_token_staleness
    excludes_tokens = {
        'off_policy_correction.weight = "mask" with granularity = "token"': is_token_mask,
        f"off_policy_correction.max_binary_kl = {max_binary_kl}": max_binary_kl is not None,
        f"off_policy_correction.max_token_staleness = {max_staleness}": max_staleness is not None,
        f"loss.top_entropy_frac = {loss.top_entropy_frac}": loss.top_entropy_frac < 1,
    }
    for key, is_set in excludes_tokens.items():
        refuse(
            is_set and loss.is_of_completion,
            f'{key} with loss.objective = "{loss.objective}": its ratio covers the whole completion, so excluded '
            'tokens would still change it; exclude completions (granularity = "sequence" or "geometric", '
            "sequence_mask) or choose another objective",
        )


def _check_references(config: "LearnerConfig") -> None:
    reference, temperature = config.reference, config.sampling.temperature
    refuse(
        reference.endpoint is not None and temperature != 1,
        f'reference.endpoint = "{reference.endpoint}" with sampling.temperature = {temperature}: a '
        "server scores at temperature 1; set sampling.temperature to 1, or remove reference.endpoint",
    )
    refuse(
        config.kl.is_on and reference.kind == "none",
        f"kl.coef = {config.kl.coef} needs a reference; set reference.kind, or kl.coef to 0",
    )
    is_policy_itself = reference.kind == "every" and reference.every_steps == 1 and reference.growth is None
    refuse(
        is_policy_itself and (config.updates_per_batch == 1 or config.kl.place != "loss"),
        'reference.kind = "every" with every_steps = 1: the KL is measured at the start of a step, where the '
        "reference equals the policy and the KL is 0; raise every_steps",
    )
    refuse(
        reference.kind == "ema" and bool(config.lora.rank),
        f'reference.kind = "ema" with lora.rank = {config.lora.rank}: an adapter is the product of A and B, and the '
        'means of A and B do not give the mean of the adapters; set reference.kind to "every" or "mixture", or '
        "lora.rank to 0",
    )
    selects = {
        "dynamic_sampling = true": config.dynamic_sampling,
        f'curriculum.kind = "{config.curriculum.kind}"': config.curriculum.kind != "none",
    }
    for key, is_set in selects.items():
        refuse(
            is_set and reference.kind == "adaptive" and reference.reward_guard,
            f"{key} with reference.reward_guard = true: the mean reward of selected groups falls while the policy "
            "improves, so the reference would never be refreshed; set reward_guard = false",
        )


def _check_evaluations(config: "LearnerConfig") -> None:
    evaluation, checkpoint = config.evaluation, config.checkpoint
    for name, chosen in evaluation.sets.items():
        part = {key: value for key in ("split", "dataset_config") if (value := getattr(chosen, key)) is not None}
        refuse(
            bool(part) and not _has_dataset(evaluation.of_set(name), config),
            f"evaluation.sets.{name} has {part}, but its prompts are of no dataset; set its dataset, or remove these "
            "keys",
        )
    refuse(
        checkpoint.is_by_evaluation
        and (evaluation.every_steps == 0 or checkpoint.every_steps % evaluation.every_steps != 0),
        f'checkpoint.best_by = "{checkpoint.best_by}" with checkpoint.every_steps = {checkpoint.every_steps} and '
        f"evaluation.every_steps = {evaluation.every_steps}: some checkpoints would have no evaluation; set "
        "evaluation.every_steps to a divisor of checkpoint.every_steps",
    )
    if not evaluation.every_steps:
        return
    names = [f'"evaluation/{name}"' if name else '"evaluation"' for name in evaluation.set_names()]
    refuse(
        checkpoint.is_by_evaluation and checkpoint.judging_set not in evaluation.set_names(),
        f'checkpoint.best_by = "{checkpoint.best_by}" is not a set of learner.evaluation; use {" or ".join(names)}',
    )
    refuse(
        evaluation.pin_policy and config.weight_sync.overlap_with_training,
        "evaluation.pin_policy = true with weight_sync.overlap_with_training = true: a weight sync that overlaps the "
        "next step cannot wait until an evaluation of the old version is complete; set one of them to false",
    )
