"""Which families of experts can replay a server's routing, in the learner's pass: `python -m tests.sweep.routing`."""

import sys

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from learner.forward.packing_check import choose_attention
from learner.forward.replay import routing_shape
from learner.forward.replay_check import find_routers
from protocol.errors import ConfigError
from tests.sweep.families import CannotBuild, tiny_config, tiny_model


def problem_of(family: str) -> str | None:
    """Return why a family cannot replay, or None. Raises CannotBuild for one without experts or without a tiny model."""
    config = tiny_config(family)
    shape = routing_shape(config)
    if shape is None:
        raise CannotBuild("no experts")
    model = tiny_model(config).eval()
    try:
        choose_attention(model, torch.device("cpu"), torch.float32)
        find_routers(model, shape)
    except ConfigError as error:
        return str(error)
    return None


def main() -> None:
    problems: dict[str, str | None] = {}
    for family in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            problems[family] = problem_of(family)
        except CannotBuild:
            continue
        print(family, problems[family] or "yes", flush=True)
    for answer, is_wanted in (("yes", True), ("refused", False)):
        which = [family for family, problem in problems.items() if (problem is None) == is_wanted]
        print(f"| {len(which)} | {answer} | {', '.join(which)} |")


if __name__ == "__main__":
    main()
