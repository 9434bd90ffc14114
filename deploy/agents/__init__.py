"""Third-party environments as agents: each file runs with its own library and imports no Slipstream code."""
