"""Dashboard, report and comparison in a real browser: numbers are those of metrics.jsonl, on phones and desktops, light and dark."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from learner.report.dashboard import Dashboard
from learner.report.page import compare, write_comparison, write_report
from learner.report.summary import read_metrics
from tests.browser import CHROMIUM, Page, a_page
from tests.learner.report.browser_pages import (
    CARD,
    LOOKS,
    TILES,
    assert_readable,
    drawn,
    in_a_report,
    legend_of,
    looked_at,
    place_in,
)
from tests.learner.report.synthetic_run import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.mark.parametrize(("screen", "scheme"), LOOKS)
def test_the_dashboard_shows_the_numbers_of_the_run(tmp_path: Path, screen: str, scheme: str) -> None:
    write_run(tmp_path / "run", steps=60)
    lines = read_metrics(tmp_path / "run")

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                await looked_at(page, screen, scheme, dashboard.address)
                await page.until("document.querySelectorAll('.tile').length > 0")
                tiles = await page.value(TILES)
                assert tiles["Step"].startswith("60")
                assert tiles["Reward"] == f"{fmean(line['reward/mean'] for line in lines[-10:]):.3f}"
                assert tiles["Staleness"] == f"{fmean(line['staleness/mean'] for line in lines[-10:]):.2f}"
                await drawn(page)
                assert {address.rpartition("/")[0] for address in page.requests} == {dashboard.address}
                await assert_readable(page, scheme)
        finally:
            await dashboard.close()

    asyncio.run(scene())


def test_each_of_several_evaluated_sets_has_a_curve(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=20)
    rewards = {"evaluation/easy/reward": 0.75, "evaluation/hard/reward": 0.25, "evaluation/function/right/reward": 1.0}
    began = [
        dict.fromkeys(("evaluation/easy/step", "evaluation/hard/step"), 10 * (line["step"] > 10)) for line in lines
    ]
    told = [
        line | rewards | {"evaluation/pass_at_4/reward": 1.0} | steps for line, steps in zip(lines, began, strict=True)
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                await looked_at(page, "desktop", "dark", dashboard.address)
                await page.until(f"!!{CARD.format('Evaluations')}?.querySelector('canvas')")
                await page.value(f"{CARD.format('Evaluations')}.scrollIntoView({{block: 'center'}})")
                assert await legend_of(page, "Evaluations") == ["step", {"easy": "0.75", "hard": "0.25"}]
                for across, step in ((0.0, 0), (1.0, 10)):  # two sets, evaluated twice
                    await page.mouse("Moved", *await place_in(page, "Evaluations", across))
                    assert (await legend_of(page, "Evaluations"))[0] == f"step {step}"
        finally:
            await dashboard.close()

    asyncio.run(scene())


def test_the_open_page_survives_a_learner_that_is_started_again(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=40)

    async def scene() -> None:
        first = await Dashboard.start(tmp_path / "run", 0)
        port = int(first.address.rpartition(":")[2])
        async with a_page() as page:
            await looked_at(page, "desktop", "light", first.address)
            await page.until("document.querySelector('.tile .value')?.textContent.startsWith('40')")
            await first.close()
            await page.until("document.getElementById('state').textContent === 'no connection to the learner'")
            # It comes back behind a checkpoint: steps 31 to 40 come again, and others than before.
            kept = [*lines[:30], *({**line, "reward/mean": 0.5} for line in lines[30:35])]
            (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
            second = await Dashboard.start(tmp_path / "run", port)
            try:
                await page.until("document.querySelector('.tile .value')?.textContent.startsWith('35')")
                assert await page.value("document.getElementById('state').textContent") == "live"
                second.publish(36, {**lines[35], "reward/mean": 0.5})
                await page.until("document.querySelector('.tile .value')?.textContent.startsWith('36')")
                rewards = [line["reward/mean"] for line in lines[26:30]] + [0.5] * 6
                await page.until(f"({TILES})['Reward'] === '{fmean(rewards):.3f}'")
            finally:
                await second.close()

    asyncio.run(scene())


@pytest.mark.parametrize(("screen", "scheme"), LOOKS)
def test_the_report_and_the_comparison_can_be_read(tmp_path: Path, screen: str, scheme: str) -> None:
    for seed, name in enumerate(("one", "other")):
        write_run(tmp_path / name, steps=60, seed=seed)
    report = write_report(tmp_path / "one")
    comparison = write_comparison(*compare([tmp_path / "one", tmp_path / "other"]))
    lines = read_metrics(tmp_path / "one")

    async def scene() -> None:
        async with a_page() as page:
            await looked_at(page, screen, scheme, report.as_uri())
            await drawn(page)
            tiles: dict[str, Any] = await page.value(TILES)
            ends = [fmean(line["reward/mean"] for line in part) for part in (lines[:6], lines[-6:])]
            assert tiles["Reward"] == f"{ends[0]:.2f} → {ends[1]:.2f}"
            await assert_readable(page, scheme)
            await looked_at(page, screen, scheme, comparison.as_uri())
            assert await page.value("document.querySelectorAll('canvas').length") == 5
            await assert_readable(page, scheme)
            assert page.requests == [report.as_uri(), comparison.as_uri()], "one file each, nothing from elsewhere"

    asyncio.run(scene())


def test_the_search_keeps_the_rows_that_have_the_text(tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        rows = "[...document.querySelectorAll('tr.completion')].filter((row) => row.checkVisibility())"
        samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
        shown = [*samples[:25], *samples[-25:]]
        whole = await page.value(f"{rows}.length")
        assert whole == sum(min(4, len(sample["completions"])) for sample in shown)
        wanted = shown[30]["answer"]
        fill = "(() => {{ const box = document.querySelector('.search'); box.value = {};box.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
        await page.value(fill.format(json.dumps(wanted)))
        left = await page.value(f"{rows}.map((row) => row.cells[0].textContent)")
        texts = [
            (str(sample["step"]), [sample["prompt"], text, sample["answer"]])
            for sample in shown
            for text in sample["completions"][:4]
        ]
        assert left == [step for step, parts in texts if any(wanted in part for part in parts)]
        assert await page.value("document.querySelector('output').textContent") == f"{len(left)} of {whole}"
        await page.value(fill.format("''"))
        assert await page.value(f"{rows}.length") == whole

    in_a_report(tmp_path, look)


def test_what_a_model_wrote_runs_in_no_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=3)
    hostile = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
    sample = {"step": 1, "prompt": hostile, "completions": [hostile], "rewards": [1.0], "answer": hostile}
    (tmp_path / "run/samples.jsonl").write_text(json.dumps(sample) + "\n")
    lines = [{**line, f"reward/{hostile}": 0.5, "reward/other": 0.5} for line in read_metrics(tmp_path / "run")]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = write_report(tmp_path / "run")

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                for address in (report.as_uri(), dashboard.address):
                    await page.open(address)
                    await page.until(f"!!{CARD.format('Each reward function')}?.querySelector('canvas')")
                    await page.until("document.querySelectorAll('tr.completion').length === 1")
                    assert "ran" not in await page.value("document.title") and page.errors == []
                    assert await page.value("document.querySelectorAll('img').length") == 0
        finally:
            await dashboard.close()

    asyncio.run(scene())
