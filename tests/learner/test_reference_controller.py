"""Which server may compute the reference's logprobs of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.policy.server_reference import ServerReference
from learner.reference_controller import ReferenceController
from learner.run_inputs import RunInputs
from protocol.errors import ConfigError
from tests.learner.runs import make_run

ENDPOINT = "tcp://teacher:1"
PLAYED = {"factory": "guess", "max_turns": 4}


def check(tmp_path: Path, welcome: dict[str, Any], *, is_copy: bool = False, **learner: Any) -> None:
    """Check a server whose run has a policy on servers with max_model_len = 64."""
    run = make_run(
        tmp_path, "tcp://a:1", kl={"coef": 0.1}, reference={"kind": "fixed", "endpoint": ENDPOINT}, **learner
    )
    state = ServerReference(run.learner.reference, tmp_path, is_main=True)
    parts: Any = {"copy": object() if is_copy else None, "fleet": SimpleNamespace(max_model_len=64)}
    controller = ReferenceController(run_inputs=RunInputs(run), state=state, scores=None, published=None, **parts)
    offered: Any = SimpleNamespace(**{"max_model_len": 65, "model_digest": "d", "quantization": ""} | welcome)
    controller._check(ENDPOINT, offered)


@pytest.mark.parametrize(
    ("environment", "max_model_len", "error"),
    [
        (PLAYED, 65, None),
        (PLAYED, 64, r"= 64, .*longest sequence of 64 tokens.*= 65 there, or set .*max_episode_tokens = 63$"),
        (PLAYED | {"max_episode_tokens": 63}, 64, None),
        (PLAYED | {"max_episode_tokens": 40}, 40, r"longest sequence of 40 tokens .*max_episode_tokens = 39$"),
        ({}, 11, None),
        ({}, 10, r"longest sequence of 10 tokens .*= 11 there, or lower learner\.sampling\.max_tokens$"),
    ],
)
def test_the_context_of_a_reference_must_hold_the_longest_episode_and_one_more_token(
    tmp_path: Path, environment: dict[str, Any], max_model_len: int, error: str | None
) -> None:
    if error is None:
        check(tmp_path, {"max_model_len": max_model_len}, environment=environment)
    else:
        with pytest.raises(ConfigError, match=error):
            check(tmp_path, {"max_model_len": max_model_len}, environment=environment)


def test_a_quantized_reference_is_named_and_a_quantized_copy_of_the_policy_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(tmp_path, {})
    assert "quantizes" not in caplog.text
    check(tmp_path, {"quantization": "fp8 KV cache"})
    assert f'"{ENDPOINT}": the server quantizes (fp8 KV cache), and the KL contains the rounding' in caplog.text
    with pytest.raises(ConfigError, match=r"quantizes \(fp8 KV cache\), .*--server\.quantization None"):
        check(tmp_path, {"quantization": "fp8 KV cache"}, is_copy=True)
