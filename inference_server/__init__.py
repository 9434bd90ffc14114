"""The inference server: vLLM behind one ZeroMQ front door; it knows weights and policy versions, never tasks or rewards."""
