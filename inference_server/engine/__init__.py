"""The engine: what the server asks of one (interface.py), and vLLM behind it. The only place but http.py that imports vllm."""
