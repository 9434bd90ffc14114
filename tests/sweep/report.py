"""The expected results of the sweep, which are its last recorded results, and their table."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from tests.sweep.visit import Visit

KEPT = Path(__file__).parents[1] / "bench/results/sweep.json"
FLOAT32, FLOAT32_LOUD = 3e-5, 3e-4
"""Largest difference of any token, in nats."""
TIMES_ROUNDING = 1.5
"""Largest mean difference in bfloat16, in units of eager attention's mean difference in bfloat16."""
TIED = {"doge"}
"""Families that keep the keys with the largest scores, where equal tokens have equal scores. The choice depends on the
length of a pass, in eager attention too, beyond `keep_window_size` keys: 24 in the sweep, 2,048 in a checkpoint."""


@cache
def kept_visits() -> dict[str, Visit]:
    """Return the recorded results by family."""
    kept: dict[str, object] = msgspec.json.decode(KEPT.read_bytes())
    return {visit.family: visit for visit in msgspec.convert(kept["visits"], list[Visit])}


def problem_of(visit: Visit) -> str | None:
    """Return a description of an unexpected result, or None."""
    kept = kept_visits().get(visit.family)
    if kept is None or visit.way != kept.way:
        return f"the way differs from {kept and kept.way} in {KEPT.name}: {visit}"
    if visit.way in ("refused", "not built"):
        return None if visit.reason else f"no reason given: {visit}"
    if visit.float32 is None or visit.float32_loud is None or visit.with_mates is None:
        return f"not measured: {visit}"
    if visit.family in TIED:
        return None
    if max(visit.float32, visit.with_mates) > FLOAT32 or visit.float32_loud > FLOAT32_LOUD:
        return f"too far off in float32: {visit}"
    if "refused" in visit.ways:  # the family's code mixes float32 with the dtype of its parameters
        return None
    if visit.bfloat16 is None or visit.bfloat16_base is None or visit.rounding is None:
        return f"not measured in bfloat16: {visit}"
    if max(visit.bfloat16, visit.bfloat16_base) > TIMES_ROUNDING * visit.rounding + 1e-3:
        return f"too far off in bfloat16: {visit}"
    return None


def by_way(visits: Sequence[Visit]) -> str:
    """Return the table of the docs: families by way."""
    families: dict[str, list[str]] = defaultdict(list)
    for visit in visits:
        in_float32, *in_bfloat16 = visit.ways
        is_alone = in_float32 != "refused" and in_bfloat16 == ["refused", "refused"]
        families[f"{in_float32}, in float32 alone" if is_alone else visit.way].append(visit.family)
    rows = [f"| {len(names)} | {way} | {', '.join(names)} |" for way, names in families.items()]
    rows.sort(key=lambda row: -int(row.split()[1]))
    return "\n".join(["| families | way | which |", "|---|---|---|", *rows])


def figures(visits: Sequence[Visit]) -> str:
    """Return the largest differences, for the docs."""
    measured = [visit for visit in visits if visit.family not in TIED]
    worst = {name: max(getattr(v, name) or 0.0 for v in measured) for name in ("float32", "float32_loud", "with_mates")}
    worst["bfloat16 ÷ rounding"] = max(v.bfloat16 / v.rounding for v in measured if v.bfloat16 and v.rounding)
    return "\n".join(f"{name}: {value:.1e}" for name, value in worst.items())
