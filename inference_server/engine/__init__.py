"""Engine interface (interface.py) and its vLLM implementation. Only this package and http.py import vllm."""
