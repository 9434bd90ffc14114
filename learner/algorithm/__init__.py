"""The formulas: rewards to advantages, logprobs to loss, the schedules. Pure; imports the config and nothing else of ours."""
