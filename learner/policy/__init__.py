"""The weights: the model, its adapter, their snapshots, the reference that they make, and how they are given to others."""
