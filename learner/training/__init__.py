"""One step: `ScoredGroup`s to micro-batches, loss, gradient and new weights, on every rank."""
