"""Benchmarks: what Slipstream learns, and how fast."""
