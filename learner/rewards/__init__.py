"""Reward scoring: functions in killable processes rate completions."""
