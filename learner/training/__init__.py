"""Training step on every rank: `ScoredGroup`s to micro-batches, loss, gradient and new weights."""
