"""Prompts: from data to `Prompt`, and the choice of the next prompt."""
