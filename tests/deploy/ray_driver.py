"""`slipstream ray` with servers of the tiny model: `python -m tests.deploy.ray_driver run.toml [--key value ...]`."""

import sys

from deploy.ray import run_on_ray
from protocol import console

if __name__ == "__main__":
    console.start_logging()
    with console.exit_on_user_error():
        sys.exit(run_on_ray(sys.argv[1:], "tests.deploy.tiny_server"))
