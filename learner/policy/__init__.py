"""Weights: the model, its adapter, their snapshots, the reference, and publishing and saving them."""
