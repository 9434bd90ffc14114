"""Environments of others as agents: each file runs in an interpreter that has their library, and imports nothing of ours."""
