"""Inference server: vLLM behind one ZeroMQ socket. It knows weights and versions, not tasks or rewards."""
