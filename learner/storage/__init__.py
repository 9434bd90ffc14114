"""The directory of a run and its checkpoints, written so that a kill leaves the old or the new."""
