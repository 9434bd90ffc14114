"""From the tokens of groups to the logprobs that the policy gives them: each prompt computed once, nothing padded, no whole logits."""
