"""Shared code of learner and server: messages, channel, config, models, weights."""
