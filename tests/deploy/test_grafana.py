"""The Grafana dashboard: valid for Grafana, and every query uses a metric of a learner or a server.

A real server's metrics are checked in tests/inference_server/test_vllm.py.
"""

import re
from pathlib import Path

import pytest

from learner.report.dashboard import NewestStep
from learner.report.history import History
from learner.train import train
from tests.deploy.grafana import BOARD, METRIC, asked_of_learner, expressions, panels
from tests.learner.model_engine import tiny_server
from tests.learner.openai_server import openai_server
from tests.learner.runs import make_run, metrics_of

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
KEYS = {"id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "options", "targets"}
"""The parts of Grafana's schema (dashboard schemaVersion 39) that these panels use."""


def test_each_panel_has_the_fields_that_grafana_reads() -> None:
    assert BOARD["uid"] == "slipstream" and BOARD["schemaVersion"] == 39
    (variable,) = BOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    for panel in panels():
        assert panel.keys() == KEYS and panel["type"] == "timeseries" and panel["description"]
        assert panel["datasource"] == SOURCE
        assert panel["fieldConfig"]["defaults"]["unit"] in ("none", "s", "percentunit")
        for target in panel["targets"]:
            assert target.keys() == {"refId", "datasource", "expr", "legendFormat"} and target["datasource"] == SOURCE
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_expressions_are_a_metric_or_the_rate_of_a_counter() -> None:
    name = METRIC.pattern
    for expression in expressions():
        assert re.fullmatch(rf"{name}|rate\({name}_total\[\$__rate_interval\]\)", expression), expression
        if expression.endswith("_total"):
            assert expression == "slipstream_engine_restarts_total", "only this counter is shown as a total"


def test_a_panel_in_shares_of_time_is_of_one_source() -> None:
    (idle,) = (panel for panel in panels() if panel["title"] == "Idle time")
    assert {target["expr"] for target in idle["targets"]} <= asked_of_learner(), "a server's average is since its start"


def test_a_learner_has_every_queried_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "inference_server.server.PULSE_INTERVAL_S", 0.03
    )  # idle times come with it, also in a short run
    with tiny_server() as server, openai_server() as openai:
        openai.of(server)
        evaluation = {"url": openai.url, "every_steps": 2, "timeout_s": 30}
        run = make_run(
            tmp_path, server.endpoint, kl={"coef": 0.01}, reference={"kind": "fixed"}, evaluation=evaluation,
            max_staleness=0,
        )  # fmt: skip
        train(run, resume=False)
    history = History()
    history.add(4, metrics_of(run)[-1])
    scraped = {family.name for family in NewestStep(lambda: history).collect()}
    assert len(asked_of_learner()) > 15 and sorted(asked_of_learner() - scraped) == []
