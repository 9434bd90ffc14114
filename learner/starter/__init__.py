"""Template of `slipstream new`: a small task that runs as it is."""
