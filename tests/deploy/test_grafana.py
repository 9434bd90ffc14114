"""The Grafana dashboard: whole by the parts that Grafana reads, and every query's metric is in a real scrape."""

import asyncio
import re
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.train import train
from protocol.model_files import resolve_model
from tests.deploy.grafana import BOARD, METRIC, asked_of_learner, asked_of_servers, expressions, panels
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.openai_server import openai_server
from tests.learner.report.pages import observed
from tests.learner.runs import make_run

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class GridPos(msgspec.Struct, forbid_unknown_fields=True):
    h: int
    w: int
    x: int
    y: int


class Target(msgspec.Struct, forbid_unknown_fields=True):
    refId: str
    datasource: dict[str, str]
    expr: str
    legendFormat: str


class Panel(msgspec.Struct, forbid_unknown_fields=True):
    """Of Grafana's schema (dashboard schemaVersion 39) what these panels have."""

    id: int
    type: str
    title: str
    description: str
    datasource: dict[str, str]
    gridPos: GridPos
    fieldConfig: dict[str, object]
    options: dict[str, object]
    targets: list[Target]


def test_each_panel_has_what_grafana_reads_and_a_place_of_its_own() -> None:
    assert BOARD["uid"] == "slipstream" and BOARD["schemaVersion"] == 39
    (variable,) = BOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    found = [msgspec.convert(panel, Panel) for panel in panels()]
    assert {panel.type for panel in found} == {"timeseries"} and all(panel.description for panel in found)
    assert all(one["datasource"] == SOURCE for panel in panels() for one in (panel, *panel["targets"]))
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in panels()} <= {"none", "s", "percentunit"}
    places = [GridPos(**panel["gridPos"]) for panel in BOARD["panels"]]
    assert all(place.x >= 0 and place.x + place.w <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = (
            one.x + one.w <= other.x
            or other.x + other.w <= one.x
            or one.y + one.h <= other.y
            or other.y + other.h <= one.y
        )
        assert apart, (one, other)


def test_expressions_are_a_metric_or_the_rate_of_a_counter() -> None:
    name = METRIC.pattern
    for expression in expressions():
        assert re.fullmatch(rf"{name}|rate\({name}_total\[\$__rate_interval\]\)", expression), expression
        assert expression.startswith("rate(") == expression.removesuffix("[$__rate_interval])").endswith("_total") or (
            expression == "slipstream_engine_restarts_total"
        )


def test_a_learner_has_all_that_is_asked_of_it(tmp_path: Path) -> None:
    with tiny_server(ModelEngine(resolve_model("tiny:digits"))) as server, openai_server() as openai:
        openai.of(server)
        evaluation = {"url": openai.url, "every_steps": 2, "timeout_s": 30}
        train(
            make_run(
                tmp_path,
                server.endpoint,
                kl={"coef": 0.01},
                reference={"kind": "fixed"},
                evaluation=evaluation,
                max_staleness=0,
            ),
            resume=False,
        )

    async def scrape(dashboard, session):
        async with asyncio.timeout(60):
            while True:
                async with session.get("/metrics") as response:
                    text = await response.text()
                if "slipstream_step 4.0" in text:
                    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
                await asyncio.sleep(0.05)

    scraped = observed(tmp_path / "run", scrape)
    assert len(asked_of_learner()) > 15 and sorted(asked_of_learner() - scraped) == []


@pytest.mark.parametrize("name", sorted(asked_of_servers()))
def test_what_is_asked_of_servers_is_a_counter_or_a_gauge_as_it_is_asked(name: str) -> None:
    """That a real server has all of them: tests/inference_server/test_vllm.py."""
    source = (Path(__file__).parents[2] / "inference_server/http.py").read_text()
    if name.startswith("slipstream_"):
        kind = "Counter" if name.endswith("_total") else "Gauge"
        assert re.search(rf'{kind}MetricFamily\(\s*"{name.removesuffix("_total")}"', source)
