"""`slipstream new my-task`: create a directory with a recipe, prompts, a reward function and its test.

    learner/starter/files/ ─▶ DIR, with its name filled into the recipe

Invariant: no existing file is overwritten.
"""

import re
import shlex
import shutil
from pathlib import Path

from protocol.errors import ConfigError

FILES = Path(__file__).parent / "files"
PLACEHOLDER = "MY_TASK"
"""Placeholder in the recipe for the directory, as given on the command line."""


def write_starter(directory: Path) -> str:
    """Write the starter files; return the next steps for the user.

    Raises:
        ConfigError: The name does not fit a recipe, or the directory exists or cannot be written.
    """
    if not str(directory).isprintable() or set('"\\') & set(str(directory)):  # TOML would need escapes
        raise ConfigError(
            f"{str(directory)!r} cannot be used in a recipe; choose a name of printable characters without double "
            "quotes and backslashes"
        )
    try:
        directory.mkdir(parents=True)
        for source in sorted(FILES.iterdir()):
            if source.is_file():
                shutil.copyfile(source, directory / source.name)
        recipe = directory / "run.toml"
        # In one pass, as the name may contain the placeholder.
        filled = re.sub(
            f"(runs/)?{PLACEHOLDER}",
            lambda found: f"runs/{directory.name}" if found[1] else str(directory),
            recipe.read_text("utf-8"),
        )
        recipe.write_text(filled, "utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{directory} exists; choose a directory that does not exist, and `slipstream new` creates it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}; choose another directory") from error
    train = "train: server and learner on this machine"
    test_path, recipe_path = shlex.quote(str(directory)), shlex.quote(f"{directory}/run.toml")
    return f"""wrote {directory}/: prompts.jsonl, reward.py, test_reward.py, run.toml. Next:
  python -m pytest {test_path}                      # check that the reward matches your intent
  slipstream colocate {recipe_path}          # {train}; runs/{directory.name}/report.html"""
