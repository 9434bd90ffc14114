"""The tables of docs/memory.md, from the functions of the learner; `python -m tests.learner.policy.planned_sizes`
writes them."""

from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.policy.memory import GIB, learner_memory, server_memory
from learner.policy.memory_plan import Room, make_plan
from learner.policy.model_shape import shape_of
from protocol.errors import ConfigError
from tests.learner.policy.shapes import SIZES
from tests.learner.training.fixed_groups import make_run

PAGE = Path(__file__).parents[3] / "docs/memory.md"
ROOMS = {
    "1 × 24 GB": Room(device_gib=23.0, device_total_gib=24.0, host_gib=120.0),
    "1 × 80 GB": Room(device_gib=79.0, device_total_gib=80.0, host_gib=240.0),
    "8 × 80 GB": Room(device_gib=79.0, device_total_gib=80.0, host_gib=1900.0, num_ranks=8, ranks_per_node=8),
    "16 × 80 GB": Room(device_gib=79.0, device_total_gib=80.0, host_gib=1900.0, num_ranks=16, ranks_per_node=8),
}
PLANNED = ("| Model | GPUs | `sharding` | `micro_batch_tokens` | `gradient_checkpointing` | `optimizer.offload` | GiB "
           "per GPU | GiB per host |",
           "|---|---|---|---|---|---|---|---|")  # fmt: skip
ADAPTED = (
    "| Model | whole model | [LoRA](lora.md) of rank 16 | weights at the server, without KV cache |",
    "|---|---|---|---|",
)


def run_of(**learner: Any) -> LearnerRun:
    settings = {"sampling": {"group_size": 16, "max_tokens": 2048}} | learner
    return msgspec.structs.replace(make_run(**settings), dtype="bfloat16")


def planned_rows() -> list[str]:
    """What is chosen for whole models, and what it needs."""
    rows = []
    for size, config in SIZES.items():
        shape = shape_of(config)
        for name, room in ROOMS.items():
            try:
                plan = make_plan(shape, run_of(), room)
            except ConfigError as refusal:
                changes = str(refusal).rpartition(". Set ")[2].replace(" at the start", "")
                rows.append(f"| {size} | {name} | refused: {changes} | | | | | |")
                continue
            chosen = plan.run.learner
            values = (plan.sharding, f"{chosen.micro_batch_tokens:,}", str(chosen.gradient_checkpointing).lower(),
                      str(chosen.optimizer.offload).lower(), f"**{plan.memory.device_gib:.0f}**",
                      f"{plan.memory.host_gib:.0f}")  # fmt: skip
            rows.append(f"| {size} | {name} | {' | '.join(values)} |")
    return rows


def adapted_rows() -> list[str]:
    """What one GPU needs at least for passes of 16,384 tokens, without sharding."""
    rows = []
    settings = {"gradient_checkpointing": True, "micro_batch_tokens": 16384, "sharding": "none"}
    for size, config in SIZES.items():
        shape = shape_of(config)
        whole = learner_memory(shape, run_of(**settings, optimizer={"offload": True})).device_gib
        adapter = learner_memory(shape, run_of(**settings, lora={"rank": 16})).device_gib
        server = server_memory(shape, run_of()).device["weights"] / GIB
        rows.append(f"| {size} | {whole:.0f} | {adapter:.0f} | {server:.1f} |")
    return rows


def replace_rows(text: str, header: tuple[str, ...], rows: list[str]) -> str:
    """The text with other rows below a table's header."""
    before, _, after = text.partition("\n".join(header) + "\n")
    lines = after.splitlines(keepends=True)
    while lines and lines[0].startswith("|"):
        lines.pop(0)
    return before + "\n".join((*header, *rows)) + "\n" + "".join(lines)


if __name__ == "__main__":
    page = replace_rows(PAGE.read_text(), PLANNED, planned_rows())
    PAGE.write_text(replace_rows(page, ADAPTED, adapted_rows()))
