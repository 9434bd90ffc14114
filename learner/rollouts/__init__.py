"""Rollouts: prompts in, scored groups out, with bounded staleness and a durable ledger."""
