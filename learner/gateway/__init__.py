"""OpenAI endpoint for agents that own their loop, recorded token for token."""
