"""Template of `learner new`: a small task that runs as it is."""
