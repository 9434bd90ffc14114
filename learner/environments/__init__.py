"""Environments that answer the policy's turns, and the exact tokens of episodes."""
