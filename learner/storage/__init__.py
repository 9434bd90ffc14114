"""Run directory and checkpoints, written so that a kill leaves either the old or the new state."""
