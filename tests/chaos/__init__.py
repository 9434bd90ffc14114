"""Faults at random moments and at every named state of the running system, and an audit of what is left: `python -m tests.chaos`."""
