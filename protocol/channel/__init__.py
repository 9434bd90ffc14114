"""The typed ZeroMQ channel, its keys, and who may speak on it. The only place that imports zmq."""
