"""Connections to the inference servers: links, weight sync and the parity checks."""
