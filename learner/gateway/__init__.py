"""Endpoint for agents that own their loop, in several APIs, recorded token for token."""
