"""What `learner new` writes: a task of one's own, small enough to be read at once, that runs as it stands."""
