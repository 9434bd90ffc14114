"""Drawing for the run report: matplotlib axes in the page's style, as inline SVG.

Colors are placeholders that become CSS variables, so one SVG serves light and dark pages.
Text stays text and takes the page's font.
Invariant: matplotlib's global state is unchanged, and no two charts share an id.
"""

import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

log = logging.getLogger(__name__)

Format = Callable[[float], str]

INK, MUTED, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
BLUE, AMBER, TEAL, VIOLET, ROSE, GREY = "#0a0b04", "#0a0b05", "#0a0b06", "#0a0b07", "#0a0b08", "#0a0b09"
GREEN, RED, CYAN, OLIVE, BROWN, INDIGO = "#0a0b0a", "#0a0b0b", "#0a0b0c", "#0a0b0d", "#0a0b0e", "#0a0b0f"
COLOURS = (BLUE, AMBER, TEAL, VIOLET, ROSE, GREY, GREEN, RED, CYAN, OLIVE, BROWN, INDIGO)
"""Colors of curves of the same kind, in order."""
VARIABLE_OF = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    BLUE: "var(--blue)",
    AMBER: "var(--amber)",
    TEAL: "var(--teal)",
    VIOLET: "var(--violet)",
    ROSE: "var(--rose)",
    GREY: "var(--grey)",
    GREEN: "var(--green)",
    RED: "var(--red)",
    CYAN: "var(--cyan)",
    OLIVE: "var(--olive)",
    BROWN: "var(--brown)",
    INDIGO: "var(--indigo)",
}
NICE = [1, 2, 2.5, 5, 10]  # ticks at round numbers
MAX_POINTS = 800  # per curve; each bin keeps its lowest and highest point, so that spikes stay
HEIGHT_IN, WIDTH_IN = 2.35, 5.6


class Curve(msgspec.Struct, frozen=True):
    metric: str
    label: str
    """Text at the end of the curve, before its last value."""
    colour: str
    dots: bool = False
    """Whether to draw points without a mean, for a metric that only some steps have."""

    def end(self, values: np.ndarray, log: bool) -> float:
        """Return the value for the label."""
        return float(values[-1] if self.dots else moving_mean(values, log)[-1])


def series(metrics: Sequence[dict[str, float]], name: str, against: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite values of a metric, with the step or second of each.

    Later lines repeat the reward of an evaluation. The result has it once, at the step of the evaluation.
    """
    began = re.sub(r"reward(/low|/high)?$", "step", name)
    if name.startswith("evaluation/") and began != name:
        first = {
            line[began]: {**line, "step": line[began]} for line in reversed(metrics) if line.get(began) is not None
        }
        metrics = [first[step] for step in sorted(first)]
    pairs = [
        (line[against], line[name]) for line in metrics if line.get(name) is not None and line.get(against) is not None
    ]
    table = np.array(pairs, dtype=float).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], table[:, 1]


def moving_mean(values: np.ndarray, log: bool) -> np.ndarray:
    """Return the centered mean over about a twentieth of the run.

    The window is cut off at the ends. The mean is geometric on a log axis.
    """
    window = min(len(values), max(1, len(values) // 20)) | 1
    half = window // 2
    heights = np.log(values) if log else values
    sums = np.concatenate([[0.0], np.cumsum(heights)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    means = (sums[last] - sums[first]) / (last - first)
    return np.exp(means) if log else means


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(x) <= MAX_POINTS:
        return x, y
    bins = np.array_split(np.arange(len(x)), MAX_POINTS // 2)
    kept = np.unique(
        [pick for members in bins for pick in (members[y[members].argmin()], members[y[members].argmax()])]
    )
    return x[kept], y[kept]


def draw_curve(axes: Axes, curve: Curve, x: np.ndarray, y: np.ndarray, log: bool) -> None:
    if curve.dots or len(x) == 1:
        axes.plot(*thinned(x, y), "o-", color=curve.colour, markersize=4, markeredgewidth=0, linewidth=0.9, alpha=0.9)
        return
    axes.plot(*thinned(x, y), color=curve.colour, linewidth=0.9, alpha=0.3)
    axes.plot(*thinned(x, moving_mean(y, log)), color=curve.colour, linewidth=1.9, solid_capstyle="round")


def canvas(right_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
    left, bottom, top = 0.56 / WIDTH_IN, 0.46 / HEIGHT_IN, 1 - 0.1 / HEIGHT_IN
    axes = figure.add_axes((left, bottom, 1 - right_in / WIDTH_IN - left, top - bottom))
    axes.set_autoscaley_on(False)  # every chart sets its own limits
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, labelcolor=MUTED, labelsize=8.5, length=0, pad=5, which="both")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=MUTED, fontsize=8.5)
    return figure, axes


def step_ticks() -> MaxNLocator:
    return MaxNLocator(6, integer=True, steps=NICE)


def set_limits(axes: Axes, values: list[np.ndarray], fmt: Format, log: bool) -> None:
    """Set limits and ticks. Linear axes of values ≥ 0 start at 0, to compare heights."""
    low, high = min(float(y.min()) for y in values), max(float(y.max()) for y in values)
    if log:
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(low) - 0.1), 10 ** math.ceil(math.log10(high) + 0.1))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        bottom = 0.0 if low >= 0 else low - 0.06 * (high - low)
        axes.set_ylim(bottom, high + 0.06 * (high - bottom) if high > bottom else bottom + 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fmt(value)))
    axes.xaxis.set_major_locator(step_ticks())
    axes.margins(x=0.01)


def room_for(labels: Iterable[str]) -> float:
    """Return the inches that the labels at the right end need."""
    return 0.2 + 0.082 * max(len(label) for label in labels)


def label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Label the right ends of curves, without overlap.

    `ends` has (height in data coordinates, text, color) for each label.
    """
    to_axes = axes.transScale + axes.transLimits
    ordered = sorted(ends)
    heights = [float(to_axes.transform((0.0, y))[1]) for y, _, _ in ordered]
    gap = 0.115
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    heights[-1] = min(heights[-1], 1.0)
    for i in range(len(heights) - 2, -1, -1):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    style: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 8.5, "fontweight": "bold", "va": "center"}
    for height, (_, text, colour) in zip(heights, ordered, strict=True):
        axes.text(1.02, height, text, color=colour, **style)


def svg_of(figure: Figure, title: str) -> str:
    """Return the <svg> element, with CSS variables as colors and without shared ids."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis|FillBetweenPolyCollection)_\d+"', "", svg
    )
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg \1 role="img" aria-label="{title}" xmlns:xlink="http://www.w3.org/1999/xlink">',
        svg,
        count=1,
    )
    for placeholder, variable in VARIABLE_OF.items():
        svg = svg.replace(placeholder, variable)
    return re.sub(r"\n\s*", "\n", svg)


# ---- number formats
def plain(value: float) -> str:
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1g}"


def percent(value: float) -> str:
    shown = 100 * value
    return f"{shown:.0f} %" if shown >= 10 or shown == round(shown) else f"{shown:.1f} %"


def duration(value: float) -> str:
    return f"{1000 * value:.0f} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"


def tiny(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
