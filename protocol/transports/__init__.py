"""Transports of the weights: TCP, NCCL and CUDA IPC. Imports torch."""
