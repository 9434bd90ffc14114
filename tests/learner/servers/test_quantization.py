"""The off-policy correction of a run whose servers quantize, on scripted servers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from learner.algorithm.plug_in import has_ratio
from learner.servers.quantization import check_joiner, choose_correction, has_quantized, log_correction
from learner.train import train
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.runs import make_run, metrics_of


def member(quantization: str) -> Any:
    link = SimpleNamespace(welcome=SimpleNamespace(quantization=quantization))
    return SimpleNamespace(endpoint="tcp://a:1", link=link, welcome=None)  # the link is down for a moment


@pytest.mark.parametrize(
    ("settings", "objective", "expected"),
    [
        ({}, "grpo", ("truncate", "proximal", "log_linear")),
        ({}, "reinforce", ("truncate", "behavior", "exact")),
        ({"anchor": "proximal", "sequence_mask": 0.1}, "grpo", ("truncate", "proximal", "exact")),
        ({"anchor": "behavior"}, "grpo", ("none", "behavior", "exact")),
        ({"anchor": "behavior"}, "reinforce", ("truncate", "behavior", "exact")),
        ({"weight": "none"}, "grpo", ("none", "behavior", "exact")),
        ({"weight": "mask"}, "grpo", ("mask", "behavior", "exact")),
        ({"weight": "truncate", "anchor": "proximal"}, "gspo", ("truncate", "proximal", "exact")),
    ],
)
def test_auto_truncates_an_importance_weight_that_counts_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    objective: str,
    expected: tuple[str, str, str],
) -> None:
    caplog.set_level("INFO", "learner")
    updates = 2 if settings.get("anchor") == "proximal" else 1  # with one, a proximal anchor needs a weight
    run = make_run(
        tmp_path, "tcp://a:1", off_policy_correction=settings, loss={"objective": objective}, updates_per_batch=updates
    )
    chosen = choose_correction(run, is_quantized=True, has_ratio=has_ratio(objective)).learner.off_policy_correction
    assert (chosen.weight_used, chosen.anchor_used, chosen.proximal) == expected
    assert chosen.sequence_mask == settings.get("sequence_mask")
    before = run.learner.off_policy_correction
    assert choose_correction(run, is_quantized=False, has_ratio=True).learner.off_policy_correction == before
    log_correction(run, is_quantized=True, has_ratio=has_ratio(objective))
    assert (f'"auto" is "{expected[0]}"' in caplog.text) == ("weight" not in settings)


@pytest.mark.parametrize(("is_quantized", "anchor"), [(True, "auto"), (True, "behavior"), (False, "auto")])
def test_the_bounds_of_an_automatic_weight_count_or_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_quantized: bool, anchor: str
) -> None:
    settings = {"max_weight": 5.0, "min_weight": 0.1, "granularity": "sequence", "anchor": anchor}
    run = make_run(tmp_path, "tcp://a:1", off_policy_correction=settings).in_effect()
    log_correction(run, is_quantized=is_quantized, has_ratio=True)
    correction = choose_correction(run, is_quantized=is_quantized, has_ratio=True).learner.off_policy_correction
    is_weighted = correction.weight_used == "truncate"
    assert is_weighted == (is_quantized and anchor == "auto")
    assert (correction.weight_bound, correction.min_weight, correction.granularity) == (5.0, 0.1, "sequence")
    assert ("have no effect without a weight: granularity, max_weight, min_weight" in caplog.text) != is_weighted


@pytest.mark.parametrize(
    ("declared", "expected"), [("", ("truncate", "proximal")), ("f.has_ratio = False", ("truncate", "behavior"))]
)
def test_your_own_objective_says_whether_its_ratio_is_the_weight(
    tmp_path: Path, declared: str, expected: tuple[str, str]
) -> None:
    (tmp_path / "mine.py").write_text(f"def f(tokens, config): ...\n{declared}\n")
    run = make_run(tmp_path, "tcp://a:1", loss={"objective": (objective := f"{tmp_path / 'mine.py'}:f")})
    chosen = choose_correction(run, is_quantized=True, has_ratio=has_ratio(objective)).learner.off_policy_correction
    assert (chosen.weight_used, chosen.anchor_used) == expected


def test_without_staleness_the_exact_policy_leaves_no_clip_on_the_noise(tmp_path: Path) -> None:
    run = choose_correction(make_run(tmp_path, "tcp://a:1", max_staleness=0), is_quantized=True, has_ratio=True)
    correction = run.learner.off_policy_correction
    assert (correction.weight_used, correction.anchor_used, correction.proximal) == ("truncate", "proximal", "exact")


def test_a_quantized_server_may_join_only_runs_whose_correction_fits(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://a:1")
    quantized, plain = member("fp8 KV cache"), member("")
    check_joiner(run, quantized, is_quantized=None)
    check_joiner(run, quantized, is_quantized=True)
    check_joiner(run, plain, is_quantized=True)
    check_joiner(run, plain, is_quantized=False)
    with pytest.raises(
        ConfigError, match=r'the server at tcp://a:1 quantizes \(fp8 KV cache\), .* Set weight = "trunc'
    ):
        check_joiner(run, quantized, is_quantized=False)
    check_joiner(make_run(tmp_path, off_policy_correction={"weight": "none"}), quantized, is_quantized=False)
    assert has_quantized([plain, quantized]) and not has_quantized(
        [plain, SimpleNamespace(link=SimpleNamespace(welcome=None))]
    )


@pytest.mark.parametrize("quantization", ["", "fp8 KV cache"])
def test_the_loss_of_a_run_is_corrected_if_its_server_quantizes(tmp_path: Path, quantization: str) -> None:
    limits = msgspec.structs.replace(TINY_LIMITS, quantization=quantization)
    with tiny_server(ModelEngine(resolve_model("tiny:digits"), limits)) as server:
        train(run := make_run(tmp_path, server.endpoint, steps=3, max_staleness=0), resume=False)
    for line in metrics_of(run):
        assert ("correction/bounded_frac" in line) == bool(quantization)
        assert line["loss/clipped_frac"] == 0 or not quantization, "the ratio to the proximal policy is 1"
