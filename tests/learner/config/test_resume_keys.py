"""Which keys a resume may change. A new key is either declared as MayChange[...] or listed here."""

from learner.config import LearnerRun
from protocol.config_keys import keys_of, may_change

FIXED = {
    "": "model dtype head_dtype seed",
    "learner": "groups_per_step updates_per_batch routing_replay dynamic_sampling signal_reward",
    "learner.data": "task num_digits prompt_column system_prompt chat_template_kwargs overlong_prompts shuffle",
    "learner.reward": "functions weights only_logged skip_special_tokens overlong_buffer_tokens overlong_penalty "
    "on_none",
    "learner.reward.judge": "prompt best_score temperature",
    "learner.environment": "factory tools agent command max_turns max_episode_tokens",
    "learner.lora": "rank alpha target_modules",
    "learner.warm_start": "steps learning_rate rows_per_step answer_column",
    "learner.curriculum": "kind easy_above hard_below decay",
    "learner.sampling": "group_size max_tokens temperature top_p top_k stop allow_partial_support seeded",
    "learner.advantage": "baseline scale combine credit gamma step_weight function",
    "learner.loss": "objective normalization clip_low clip_high tau_positive tau_negative tv_low tv_high "
    "log_ratio_penalty power_positive decay_positive power_negative decay_negative cov_frac cov_low cov_high cov_penalty "
    "parameters mask_truncated entropy_coef entropy_target entropy_coef_step max_entropy_coef top_entropy_frac",
    "learner.kl": "coef estimator place schedule final_coef target horizon_steps importance_weighted",
    "learner.reference": "kind every_steps growth max_every_steps alpha kl_threshold patience reward_guard "
    "min_every_steps "
    "num_snapshots only reset_optimizer",
    "learner.optimizer": "kind schedule warmup_steps beta1 beta2 weight_decay max_grad_norm",
}
"""Fixed keys by section: with another value, a resumed run would be another experiment."""


def test_every_key_is_fixed_or_declared_changeable_at_a_resume() -> None:
    fixed = {f"{section}.{key}".lstrip(".") for section, keys in FIXED.items() for key in keys.split()}
    assert {key for key, field in keys_of(LearnerRun).items() if not may_change(field)} == fixed
