"""What the bytes of a push travel by: the group of an epoch over gloo, NCCL or CUDA IPC. Imports torch."""
