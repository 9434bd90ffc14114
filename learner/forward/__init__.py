"""Logprobs of the policy: each prompt computed once, without padding or full logits."""
