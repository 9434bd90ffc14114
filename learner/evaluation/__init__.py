"""How good the policy is, asked of a server: by a command, and beside a run that trains."""
