"""Learner: prompts, rewards, advantages, the loss, and weight sync to the running servers."""
