"""How the tests share a machine.

One compute thread for every process of a test: the models are tiny, and threads that spin fight for the cores. And the files
that start vLLM first: two files run beside each other, and whoever ends on a long one leaves the other core idle.
"""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported


@pytest.fixture(autouse=True, scope="session")
def cache_of_datasets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not the user's; read when `datasets` is imported, which no test does before it begins."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_vllm = {item.path for item in items if item.get_closest_marker("vllm")}
    items.sort(key=lambda item: item.path not in with_vllm)
