"""Prompts out, scored groups in: admission by staleness, the ledger, `Group` to `ScoredGroup`."""
