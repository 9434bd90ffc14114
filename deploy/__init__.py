"""Ways to start Slipstream: one node (colocate.py), a Ray cluster (ray.py), schedulers, and recipes."""
