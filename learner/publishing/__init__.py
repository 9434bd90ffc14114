"""Publishing of a run: one of its checkpoints as a Hugging Face directory, its model card, and the hub."""
