"""Benchmarks of learning results and speed."""
