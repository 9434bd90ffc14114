"""Evaluation of the policy through a server, by command or during training."""
