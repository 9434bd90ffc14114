"""What the sweep is expected to show, and its table."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tests.sweep.visit import Visit

KEPT = Path(__file__).parents[1] / "bench/results/sweep.json"
FLOAT32, FLOAT32_LOUD = 3e-5, 3e-4
"""Nats of any token."""
TIMES_ROUNDING = 1.5
"""Of the mean: what bfloat16 may be off by, in what eager attention is off by in it."""
REFUSED = {
    **dict.fromkeys(
        ("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "mllama"),
        "no separate language model to train",
    ),
    "cpmant": "it embeds tokens other than those of its rows",
    "prophetnet": "IndexError",
    "reformer": "in training differ by",
    "xlm": "depend on later tokens",
    "xlnet": "depend on other sequences",
}  # fmt: skip
"""Families that are not trained at all, with words of the reason."""
FLOAT32_ONLY = {"minimax", "openai-gpt", "xglm", "xlstm"}
"""Families whose own code mixes float32 with the dtype of their parameters: refused in bfloat16 over float32 masters; some run with a base in bfloat16."""
TIED = {"doge"}
"""Families that keep the keys with the largest scores where equal tokens have equal ones: which of them is kept goes by the length of a
pass, in eager attention too. Beyond `keep_window_size` keys, of which the sweep has 24 and a checkpoint 2,048.
"""
NOT_BUILT = {
    "blt": "a byte-level family of four models in one",
    "gemma4_assistant": "a draft model, which wants the hidden states of another",
    "gemma4_unified_assistant": "a draft model, which wants the hidden states of another",
    "git": "a vision tower with sizes of its own",
    "musicgen": "a text encoder and an audio decoder in one",
    "musicgen_melody": "a text encoder and an audio decoder in one",
    "phi4_multimodal": "vision and speech towers with sizes of their own",
}


def kept_visits() -> dict[str, Visit]:
    """The visits that are kept, by family."""
    kept: dict[str, object] = msgspec.json.decode(KEPT.read_bytes())
    return {visit.family: visit for visit in msgspec.convert(kept["visits"], list[Visit])}


def problem_of(visit: Visit) -> str | None:
    """What is not as expected."""
    if visit.family in NOT_BUILT:
        return None if visit.way == "not built" else f"it was built: {visit.way}"
    if visit.family in REFUSED:
        return None if visit.way == "refused" and REFUSED[visit.family] in visit.reason else f"not refused: {visit}"
    kept = kept_visits().get(visit.family)
    if kept is None or visit.way != kept.way:
        return f"another way than in {KEPT.name}, {kept and kept.way}: {visit}"
    if visit.float32 is None or visit.float32_loud is None or visit.with_mates is None:
        return f"not measured: {visit}"
    if visit.family in TIED:
        return None
    if max(visit.float32, visit.with_mates) > FLOAT32 or visit.float32_loud > FLOAT32_LOUD:
        return f"off in float32: {visit}"
    if visit.family in FLOAT32_ONLY:
        return None if visit.ways[1] == "refused" else f"not refused in bfloat16: {visit}"
    if visit.bfloat16 is None or visit.bfloat16_base is None or visit.rounding is None:
        return f"not measured in bfloat16: {visit}"
    if max(visit.bfloat16, visit.bfloat16_base) > TIMES_ROUNDING * visit.rounding + 1e-3:
        return f"off in bfloat16: {visit}"
    return None


def table(visits: Sequence[Visit]) -> str:
    """Every family with its figures, why it is not packed, and the same in short."""
    lines = [
        "| family | way | float32 | large scores | with mates | bfloat16 | eager's rounding |",
        "|---|---|---|---|---|---|---|",
    ]
    for visit in visits:
        numbers = (visit.float32, visit.float32_loud, visit.with_mates, visit.bfloat16, visit.rounding)
        cells = ["" if one is None else f"{one:.0e}" for one in numbers]
        lines.append(f"| {' | '.join([visit.family, visit.way, *cells])} |")
    reasons = [f"- {visit.family}: {NOT_BUILT.get(visit.family, visit.reason)}" for visit in visits if visit.reason]
    return "\n".join([*lines, "", *reasons, "", by_way(visits), "", figures(visits)])


def by_way(visits: Sequence[Visit]) -> str:
    """For the docs."""
    families: dict[str, list[str]] = defaultdict(list)
    for visit in visits:
        in_float32, *in_bfloat16 = visit.ways
        is_alone = in_float32 != "refused" and in_bfloat16 == ["refused", "refused"]
        families[f"{in_float32}, in float32 alone" if is_alone else visit.way].append(visit.family)
    rows = [f"| {len(names)} | {way} | {', '.join(names)} |" for way, names in families.items()]
    rows.sort(key=lambda row: -int(row.split()[1]))
    return "\n".join(["| families | way | which |", "|---|---|---|", *rows])


def figures(visits: Sequence[Visit]) -> str:
    def worst(values: Iterable[float | None]) -> str:
        return f"{max((value for value in values if value is not None), default=0.0):.0e}"

    measured = [visit for visit in visits if visit.family not in TIED]
    ratios = [visit.bfloat16 / visit.rounding for visit in measured if visit.bfloat16 and visit.rounding]
    return (
        f"{len(visits)} families. Without {', '.join(sorted(TIED))}: largest difference of any token, in nats, in float32: {worst(v.float32 for v in measured)}; with large "
        f"scores {worst(v.float32_loud for v in measured)}; of a row beside a long one and alone {worst(v.with_mates for v in measured)}. "
        f"In bfloat16, mean: at most {max(ratios, default=0.0):.1f} times what eager attention is off by there."
    )
