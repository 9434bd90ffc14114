"""Run user code in killable processes: reward functions, environments, tools and agents.

    ProcessPool (pool.py) ─▶ SandboxProcess (process.py) ─▶ start.py ─▶ a process: user_code.py
        └▶ descendants.py

Invariant: it imports nothing else of the learner, so every other package may import it.
"""
