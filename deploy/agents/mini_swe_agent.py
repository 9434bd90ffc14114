"""mini-swe-agent on small repositories: the policy repairs files with shell commands, until it submits them.

    python deploy/agents/mini_swe_agent.py --size 512 > prompts.jsonl     a toy task: a constant of a file is wrong

A row has `task` (a text), and `files` and `wanted` (texts by path). The reward is 1 if all files are as wanted.
Commands run in bubblewrap (`bwrap`): they see the repository and the read-only system, no network, no other process and
none of the learner's environment variables. Optional columns: `environment`: "local" runs them without bubblewrap and
confines nothing. `model_class`: "litellm" for a policy that calls tools.
"""

import argparse
import json
import os
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

SYSTEM = "You repair files. Answer with one shell command in a block of type mswea_bash_command."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
STEP_LIMIT = 3
FILES = ("prices", "garden", "weather", "kitchen", "garage", "library", "office", "street")
NAMES = ("TAX", "LIMIT", "RATE", "STEPS", "DEPTH", "HEIGHT", "COUNT", "SPEED")


def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Return 1 if the policy leaves the files of the row as wanted."""
    os.environ |= {  # read by litellm and mini-swe-agent when they are imported
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # the gateway has already waited for its servers
    }  # fmt: skip
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments import get_environment
    from minisweagent.models import get_model

    litellm.suppress_debug_info = True  # it asks for a price of the policy and prints that it has none
    with tempfile.TemporaryDirectory() as folder:
        for name, text in data["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kind = data.get("environment", "bubblewrap")
        environment = get_environment({"environment_class": kind, "cwd": folder, **confinement_of(kind)})
        probe = environment.execute({"command": "true"})
        if probe["returncode"] != 0:  # otherwise every command would fail, and the policy would learn from that
            raise RuntimeError(
                f"environment = {kind!r} cannot run commands here; install it, or set the column to another one: "
                f"{probe['exception_info'] or probe['output']}"
            )
        model = get_model(
            "openai/policy",
            {
                "model_class": data.get("model_class", "litellm_textbased"),
                "model_kwargs": {"api_base": base_url, "api_key": api_key, "max_retries": 0},
            },
        )
        agent = DefaultAgent(
            model, environment, system_template=SYSTEM, instance_template="{{task}}", step_limit=STEP_LIMIT,
            cost_limit=0,
        )  # fmt: skip
        with suppress(litellm.ContextWindowExceededError):  # a command printed too much; the files count as they are
            agent.run(data["task"])
        return float(all(content(Path(folder, name)) == text for name, text in data["wanted"].items()))


def confinement_of(kind: str) -> dict[str, Any]:
    """Return the options of an environment. Raises ValueError for one in which the files of a row are not seen."""
    if kind == "local":
        return {}
    if kind != "bubblewrap":
        raise ValueError(
            f"environment = {kind!r} is not supported; use 'bubblewrap', or 'local', which confines nothing"
        )
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironmentConfig

    # The library's own arguments share processes, the network and secrets such as HF_TOKEN with the learner. They set
    # PATH, after --clearenv.
    strict = ["--unshare-all", "--clearenv", "--die-with-parent"]
    return {"wrapper_args": [*strict, *BubblewrapEnvironmentConfig().wrapper_args]}


def content(path: Path) -> str | None:
    """Return the text of a file, or None if there is none that the policy may have left."""
    if path.is_symlink() or not path.is_file():
        return None
    return path.read_text(errors="replace")


def rows(size: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of the toy task, with the command that solves it as the column `demonstration`."""
    chosen, made = random.Random(seed), []
    for _ in range(size):
        file = f"{chosen.choice(FILES)}.py"
        wrong, kept = chosen.sample(NAMES, 2)
        before, other, after = chosen.sample(range(2, 100), 3)
        task = f"In {file}, change {wrong} from {before} to {after}."
        command = f"sed -i 's/{wrong} = {before}/{wrong} = {after}/' {file} && {SUBMIT}"
        made.append(
            {
                "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}],
                "task": task,
                "files": {file: f"{wrong} = {before}\n{kept} = {other}\n"},
                "wanted": {file: f"{wrong} = {after}\n{kept} = {other}\n"},
                "demonstration": f"```mswea_bash_command\n{command}\n```",
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=512, help="number of rows")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other rows, such as held-out ones")
    given = parser.parse_args()
    for row in rows(given.size, given.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
