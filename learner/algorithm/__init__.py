"""Formulas: rewards to advantages, logprobs to loss, and schedules. Pure, except for loading plug-ins."""
