"""The soak test's verdict on series with a known answer."""

import numpy as np
import pytest

from tests.bench.flatness import Flatness, flatness, theil_sen

pytestmark = pytest.mark.system

SECONDS = np.arange(600.0)


def judge(rss_mib: np.ndarray, files: np.ndarray | None = None, threads: np.ndarray | None = None) -> Flatness:
    constant = np.full(len(SECONDS), 20)
    return flatness(
        SECONDS.tolist(),
        rss_mib.tolist(),
        (constant if files is None else files).tolist(),
        (constant if threads is None else threads).tolist(),
    )


def test_constant_memory_is_flat() -> None:
    verdict = judge(np.full(600, 300.0))
    assert verdict.is_flat and verdict.slope_mib_per_hour == 0 and verdict.rss_mib == 300
    assert verdict.file_descriptors == verdict.threads == (20, 20)


def test_memory_that_grows_steadily_is_not_flat_and_its_slope_is_reported() -> None:
    verdict = judge(300 + SECONDS / 30)  # 2 MiB a minute: 16 MiB in the 8 minutes that count, of about 310
    assert not verdict.is_flat
    assert verdict.slope_mib_per_hour == pytest.approx(120)
    assert verdict.growth_mib == pytest.approx(16, abs=0.1)


@pytest.mark.parametrize(("size_mib", "is_flat"), [(300.0, False), (1000.0, True)])
def test_a_large_process_can_grow_more_than_a_small_one(size_mib: float, is_flat: bool) -> None:
    assert judge(size_mib + SECONDS / 40).is_flat == is_flat


def test_noise_and_outliers_are_not_growth() -> None:
    rss = 300 + np.random.default_rng(0).normal(0, 15, 600)
    rss[500:520] += 500  # a checkpoint, near the end
    verdict = judge(rss)
    assert verdict.is_flat and abs(verdict.growth_mib) < 10


def test_growth_is_seen_through_noise() -> None:
    assert not judge(300 + SECONDS / 20 + np.random.default_rng(0).normal(0, 15, 600)).is_flat


def test_the_warm_up_does_not_count() -> None:
    assert judge(np.minimum(SECONDS, 120.0)).is_flat


@pytest.mark.parametrize("leaking", ["files", "threads"])
def test_one_file_or_thread_more_at_the_end_is_not_flat(leaking: str) -> None:
    more = np.where(SECONDS < 400, 20, 21)
    assert not judge(np.full(600, 300.0), **{leaking: more}).is_flat


def test_a_file_that_is_open_briefly_is_not_a_leak() -> None:
    files = np.full(600, 20)
    files[::50] = 22
    verdict = judge(np.full(600, 300.0), files=files)
    assert verdict.is_flat and verdict.file_descriptors == (20, 22)


def test_the_slope_is_the_median_of_the_slopes_of_all_pairs() -> None:
    times, values = np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0, 3.0])
    assert theil_sen(times, values) == pytest.approx(1.0)  # of 2, 1 and 0.5
