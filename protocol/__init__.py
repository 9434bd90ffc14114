"""What the learner and the inference server agree on: messages, channel, config, model identity, weight transfer."""
