"""Built-in reward functions, grouped by what they rate.

`function.py` lists their names. Each has the signature of a user's reward function and would run as one.
"""
