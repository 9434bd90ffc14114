"""Ways to start Slipstream: on one node (colocate.py), and recipes."""
