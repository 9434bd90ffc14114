"""The learner: prompts, rewards, advantages, the loss, and the push of new weights into the running server."""
