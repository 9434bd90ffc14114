"""What an answer is worth: reward functions in processes that may be killed; completions in, `GroupRewards` out."""
