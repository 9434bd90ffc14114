"""An OpenAI endpoint of the learner, for agents that own their loop: what they are answered, recorded token for token."""
