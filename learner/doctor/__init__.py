"""Checks before a run, without learning: prompts, the path to the servers, noise between both sides."""
