"""Training step on every rank: `RolloutGroup`s to micro-batches, loss, gradient and new weights."""
