"""What the zoo is expected to show, and its table for the docs."""

from collections.abc import Sequence

from tests.zoo.visit import Visit

WITH_ADAPTER = ("llama", "gemma3", "mixtral")
REFUSED = {"qwen3_5": "torchvision"}
"""Families that do not run here, with a word of the reason."""


def as_expected(visit: Visit) -> bool:
    if visit.family in REFUSED:
        return REFUSED[visit.family] in visit.refused
    return visit.is_good and (visit.moved or 0) > 1e-3


def table(visits: Sequence[Visit]) -> str:
    rows = [
        "| family | after the first sync | in training | after the last sync | export in vLLM |",
        "|---|---|---|---|---|",
    ]
    for visit in visits:
        name = visit.family + (" (LoRA)" if visit.lora else "")
        distances = (visit.parity_at_start, visit.parity_in_training, visit.after_last_push, visit.export_in_vllm)
        cells = ["refused", "", "", ""] if visit.refused else [f"{one:.0e}" for one in distances if one is not None]
        rows.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(rows)
