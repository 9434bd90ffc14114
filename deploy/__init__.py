"""Ways to start Slipstream: one node (colocate.py) and recipes."""
