"""The off-policy correction of a run whose servers quantize, on scripted servers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.servers.quantization import check_joiner, log_correction, one_quantizes, settle
from protocol.errors import ConfigError
from tests.learner.runs import make_run


def member(quantization: str) -> Any:
    return SimpleNamespace(endpoint="tcp://a:1", welcome=SimpleNamespace(quantization=quantization))


@pytest.mark.parametrize(
    ("settings", "objective", "expected"),
    [
        ({}, "grpo", ("truncate", "proximal")),
        ({}, "reinforce", ("truncate", "behaviour")),
        ({"anchor": "proximal", "proximal": "log_linear", "sequence_mask": 0.1}, "grpo", ("truncate", "proximal")),
        ({"anchor": "behaviour"}, "grpo", ("none", "behaviour")),
        ({"anchor": "behaviour"}, "reinforce", ("truncate", "behaviour")),
        ({"weight": "none"}, "grpo", ("none", "behaviour")),
        ({"weight": "mask"}, "grpo", ("mask", "behaviour")),
        ({"weight": "truncate", "anchor": "proximal"}, "gspo", ("truncate", "proximal")),
    ],
)
def test_auto_truncates_an_importance_weight_that_counts_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    objective: str,
    expected: tuple[str, str],
) -> None:
    caplog.set_level("INFO", "learner")
    updates = 2 if settings.get("anchor") == "proximal" else 1  # with one, a proximal anchor needs a weight
    run = make_run(
        tmp_path, "tcp://a:1", off_policy_correction=settings, loss={"objective": objective}, updates_per_batch=updates
    )
    settled = settle(run, is_quantized=True).learner.off_policy_correction
    assert (settled.weight_used, settled.anchor_used) == expected
    assert settled.sequence_mask == settings.get("sequence_mask")
    before = run.learner.off_policy_correction
    assert settle(run, is_quantized=False).learner.off_policy_correction == before
    log_correction(run)
    assert (f'"auto" is "{expected[0]}"' in caplog.text) == ("weight" not in settings)


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
    assert one_quantizes([plain, quantized]) and not one_quantizes([plain, SimpleNamespace(welcome=None)])
