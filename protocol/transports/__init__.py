"""Transports of the weights: gloo, TCP, NCCL and CUDA IPC. Imports torch."""
