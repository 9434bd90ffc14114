"""Whether a resource of a process stays constant: a robust slope, and the verdict of the soak test."""

from collections.abc import Sequence

import msgspec
import numpy as np

WARM_UP_SHARE = 0.2
"""Share of the run to exclude: caches and allocators are still growing."""
MAX_GROWTH_SHARE = 0.02
MAX_GROWTH_MIB = 10.0
"""Growth below either limit is flat: the share is for large processes, the size for small ones."""


class Flatness(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of one process after the warm-up."""

    rss_mib: float
    """Median of the resident memory."""
    slope_mib_per_hour: float
    growth_mib: float
    """Slope × duration."""
    file_descriptors: tuple[int, int]
    """Minimum and maximum."""
    threads: tuple[int, int]
    is_flat: bool
    """Whether memory grows by less than 2 % or 10 MiB, and file descriptors and threads do not grow."""


def flatness(
    seconds: Sequence[float], rss_mib: Sequence[float], file_descriptors: Sequence[int], threads: Sequence[int]
) -> Flatness:
    """Judge series of equal length, sampled at `seconds`, without the first WARM_UP_SHARE of the time."""
    times_N = np.asarray(seconds)
    counts = times_N >= times_N[0] + WARM_UP_SHARE * (times_N[-1] - times_N[0])
    times_N, rss_N = times_N[counts], np.asarray(rss_mib)[counts]
    files_N, threads_N = np.asarray(file_descriptors)[counts], np.asarray(threads)[counts]
    slope = theil_sen(times_N, rss_N)
    growth, median = slope * float(times_N[-1] - times_N[0]), float(np.median(rss_N))
    return Flatness(
        rss_mib=median,
        slope_mib_per_hour=slope * 3600,
        growth_mib=growth,
        file_descriptors=(int(files_N.min()), int(files_N.max())),
        threads=(int(threads_N.min()), int(threads_N.max())),
        is_flat=(growth < MAX_GROWTH_MIB or growth < MAX_GROWTH_SHARE * median)
        and not (_has_grown(files_N) or _has_grown(threads_N)),
    )


def theil_sen(times_N: np.ndarray, values_N: np.ndarray) -> float:
    """Return the median slope of all pairs, which is robust against 29 % of outliers."""
    first_P, second_P = np.triu_indices(len(times_N), k=1)
    return float(np.median((values_N[second_P] - values_N[first_P]) / (times_N[second_P] - times_N[first_P])))


def _has_grown(counts_N: np.ndarray) -> bool:
    """Compare medians of the first and the last quarter, because a file that is open briefly is not a leak."""
    quarter = max(1, len(counts_N) // 4)
    return bool(np.median(counts_N[-quarter:]) > np.median(counts_N[:quarter]))
