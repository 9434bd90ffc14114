"""A user's task in files: rows, reward functions, and a recipe of 6 steps."""

import json
from pathlib import Path
from typing import Any

ROWS = [{"prompt": f"{n}>", "answer": str(n)} for n in range(20, 30)]
REWARDS = """
import statistics
import time

def right(completions, answer, **row):
    return [float(text == gold) for text, gold in zip(completions, answer)]

def length(completions, completion_ids, **row):
    return [float(len(text)) for text in completions]

def shortness(completions, **row):
    return [-float(len(text)) for text in completions]

def deviation(completions, **row):
    return [statistics.stdev(map(len, completions))] * len(completions)

def broken(completions, **row):
    raise KeyError("no such column")

def unreachable(completions, **row):
    raise ConnectionRefusedError("no service")

def progress(completions, trainer_state, **row):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def late_once(completions, answer, **row):
    if answer[0] == "23":
        time.sleep(600)
    return [1.0] * len(completions)
"""


def write_task(directory: Path, functions: tuple[str, ...] = ("right",), rows: list[dict[str, Any]] = ROWS) -> str:
    """Write the files and return the path of the recipe."""
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = directory / "run.toml"
    recipe.write_text(f"""
model = "tiny:digits"
run_dir = "{directory}/run"
[learner]
steps = 6
groups_per_step = 5
data = {{path = "{directory}/rows.jsonl"}}
sampling = {{group_size = 4, max_tokens = 8}}
reward = {{functions = {json.dumps([f"{directory}/rewards.py:{name}" for name in functions])}}}
""")
    return str(recipe)
