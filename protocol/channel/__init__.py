"""The typed ZeroMQ channel, its keys and its access control.

No other package imports zmq.
"""
