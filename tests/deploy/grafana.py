"""The queries of deploy/grafana/slipstream.json, and the metrics that each process must have."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/slipstream.json").read_text())
METRIC = re.compile(r"\b(?:slipstream_|vllm:)[a-z0-9_]+")
BOTH = "slipstream_weight_sync_stall_seconds"
"""Pattern of a gauge of the learner, or with _total of a counter of the server."""


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def asked_of_servers() -> set[str]:
    """Return metrics of vLLM and of the server, as `inference_server/http.py` names them."""
    ours = set(re.findall(r'MetricFamily\(\s*"(slipstream_[a-z_]+)"', (ROOT / "inference_server/http.py").read_text()))
    return {
        name for name in _asked() if name.startswith("vllm:") or (name.removesuffix("_total") in ours and name != BOTH)
    }


def asked_of_learner() -> set[str]:
    return _asked() - asked_of_servers()


def _asked() -> set[str]:
    return {name for expression in expressions() for name in METRIC.findall(expression)}
