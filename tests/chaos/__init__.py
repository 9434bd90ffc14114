"""Chaos testing: inject faults into a running system, then audit the result. Run `python -m tests.chaos`."""
