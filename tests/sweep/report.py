"""What the sweep is expected to show, and its table."""

from collections import Counter
from collections.abc import Sequence

from tests.sweep.visit import Visit

FLOAT32, FLOAT32_LOUD = 3e-5, 3e-4
"""Nats of any token."""
TIMES_ROUNDING = 1.5
"""Of the mean: what bfloat16 may be off by, in what eager attention is off by in it."""
REFUSED = {
    **dict.fromkeys(
        ("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "mllama"),
        "no language model that can be trained by itself",
    ),
    "cpmant": "it embeds other tokens than those of its rows",
    "prophetnet": "IndexError",
    "reformer": "gives logprobs that differ by",
    "xlm": "depend on later tokens",
    "xlnet": "depend on other sequences",
}  # fmt: skip
"""Families that are not trained at all, with words of the reason."""
FLOAT32_ONLY = {"minimax", "openai-gpt", "xglm", "xlstm"}
"""Families whose own code mixes float32 with the dtype of their parameters; refused in bfloat16."""
NOT_BUILT = {
    "blt": "a byte-level family of four models in one",
    "gemma4_assistant": "a draft model, which wants the hidden states of another",
    "gemma4_unified_assistant": "a draft model, which wants the hidden states of another",
    "git": "a vision tower with sizes of its own",
    "musicgen": "a text encoder and an audio decoder in one",
    "musicgen_melody": "a text encoder and an audio decoder in one",
    "phi4_multimodal": "vision and speech towers with sizes of their own",
}


def problem_of(visit: Visit) -> str | None:
    """What is not as expected."""
    if visit.family in NOT_BUILT:
        return None if visit.way == "not built" else f"it was built: {visit.way}"
    if visit.family in REFUSED:
        return None if visit.way == "refused" and REFUSED[visit.family] in visit.reason else f"not refused: {visit}"
    if visit.float32 is None or visit.float32_loud is None or visit.with_mates is None:
        return f"not measured: {visit}"
    if max(visit.float32, visit.with_mates) > FLOAT32 or visit.float32_loud > FLOAT32_LOUD:
        return f"off in float32: {visit}"
    if visit.family in FLOAT32_ONLY:
        return None if "refused" in visit.way else f"not refused in bfloat16: {visit}"
    if visit.bfloat16 is None or visit.rounding is None or visit.bfloat16 > TIMES_ROUNDING * visit.rounding + 1e-3:
        return f"off in bfloat16: {visit}"
    return None


def table(visits: Sequence[Visit]) -> str:
    lines = [
        "| family | way | float32 | large scores | with mates | bfloat16 | eager's rounding |",
        "|---|---|---|---|---|---|---|",
    ]
    for visit in visits:
        numbers = (visit.float32, visit.float32_loud, visit.with_mates, visit.bfloat16, visit.rounding)
        cells = ["" if one is None else f"{one:.0e}" for one in numbers]
        lines.append(f"| {' | '.join([visit.family, visit.way, *cells])} |")
    reasons = [f"- {visit.family}: {NOT_BUILT.get(visit.family, visit.reason)}" for visit in visits if visit.reason]
    return "\n".join([*lines, "", *reasons, "", summary(visits)])


def summary(visits: Sequence[Visit]) -> str:
    counts = ", ".join(f"{count} {way}" for way, count in Counter(visit.way for visit in visits).most_common())
    measured = [visit for visit in visits if visit.is_measured]
    worst = {
        "float32": max((visit.float32 or 0.0 for visit in measured), default=0.0),
        "large scores": max((visit.float32_loud or 0.0 for visit in measured), default=0.0),
        "with mates": max((visit.with_mates or 0.0 for visit in measured), default=0.0),
    }
    ratios = [visit.bfloat16 / visit.rounding for visit in measured if visit.bfloat16 and visit.rounding]
    figures = ", ".join(f"{name} {value:.0e}" for name, value in worst.items())
    return (
        f"{len(visits)} families: {counts}\n"
        f"largest difference in nats: {figures}; in bfloat16 at most {max(ratios, default=0.0):.2f} of eager's rounding"
    )
