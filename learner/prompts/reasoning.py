"""How a policy's text shows where its reasoning begins and ends. Imports nothing: rewards are read where Slipstream's packages are not installed."""

OPENS_REASONING, CLOSES_REASONING = "<think>", "</think>"
