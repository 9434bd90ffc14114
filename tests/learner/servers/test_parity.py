"""Server and learner must give the same logprobs, each server within the bound of its dtype: the probe, on scripted
scores."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from learner.config import LearnerRun
from learner.servers.parity import (
    ParityProbe,
    check_dtype,
    check_identity,
    score_fresh_server,
)
from protocol.errors import ConfigError, DeadlineExceeded, ParityError
from protocol.messages import Scores, Welcome
from tests.learner.runs import make_run

BETWEEN = 0.05
"""Above the bound of float32, which is 1e-3, and below that of bfloat16, 0.3."""
BEYOND = 0.6
LITTLE = 1.5e-3
"""Above the bound of float32; as the mean of two replicas it is below."""


class Server:
    """A member of the fleet and its link, whose logprobs are off by so much, replica by replica."""

    def __init__(
        self, *off: float, dtype: str = "float32", version: int | None = 1, endpoint: str = "tcp://a:1", **welcome: Any
    ) -> None:
        self.endpoint, self.link = endpoint, self
        self.off, self.version = off or (0.0,), version
        self.fail_with: Exception | None = None
        self.asked: list[tuple[int, int, float]] = []
        """Replica, number of tokens and deadline."""
        settings = {"max_model_len": 64, "is_untouched": True, "num_replicas": len(self.off)} | welcome
        self.welcome = Welcome(
            server_id="s", policy_version=None, num_workers=1, dtype=dtype, transports=["tcp"], devices=["cpu"],
            max_concurrent_sequences=8, **settings,
        )  # fmt: skip

    def score(self, token_ids: list[int], timeout_s: float, replica: int) -> Scores | Exception:
        self.asked.append((replica, len(token_ids), timeout_s))
        if self.fail_with is not None:
            return self.fail_with
        logprobs = np.full(len(token_ids) - 1, -1.0 - self.off[replica], np.float32)
        return Scores(request_id="1", logprobs=logprobs, policy_version=self.version)


def a_run(tmp_path: Path, dtype: str = "float32", **learner: Any) -> LearnerRun:
    return msgspec.structs.replace(make_run(tmp_path, "tcp://127.0.0.1:1", **learner), dtype=dtype)


def call(answer: Scores | Exception, timeout_s: float) -> Scores:
    """As the loop does, in which the server answers."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def probe_of(run: LearnerRun, *servers: Any, prompt_tokens: int = 5) -> ParityProbe:
    """Where every logprob is -1 on the learner."""
    fleet: Any = SimpleNamespace(members=servers, is_ready=lambda member: True, loop=SimpleNamespace(call=call))
    prompts = [list(range(prompt_tokens)), [7] * prompt_tokens]
    return ParityProbe(run, fleet, lambda sequences: -torch.ones(sum(len(ids) - 1 for ids in sequences)), prompts)


def measure(run: LearnerRun, server: Any) -> float:
    return probe_of(run, server).measure(server, version=1)


@pytest.mark.parametrize(
    ("ours", "theirs", "off", "expected"),
    [
        ("float32", "float32", [1e-4], None),
        ("float32", "float32", [0.01], r"of fixed sequences is 0\.01, the bound is 0\.001 for float32 \("),
        ("float32", "float32", [float("nan")], r"of fixed sequences is nan"),
        ("float32", "bfloat16", [BETWEEN], None),
        ("bfloat16", "float32", [BETWEEN], None),
        (
            "float32",
            "bfloat16",
            [BEYOND],
            r"0\.6, the bound is 0\.3 for float32 on the learner and bfloat16 on the server",
        ),
        ("float32", "float32", [0.0, LITTLE], r"of fixed sequences at its replica 1 is 0\.0015, the bound is 0\.001"),
        ("float32", "float32", [5e-4, 0.0], None),
    ],
)
def test_the_logprobs_of_each_replica_are_held_to_the_bound_of_the_coarser_dtype(
    tmp_path: Path, ours: str, theirs: str, off: list[float], expected: str | None
) -> None:
    run, server = a_run(tmp_path, ours), Server(*off, dtype=theirs)
    if expected is None:
        assert measure(run, server) == pytest.approx(max(off), rel=0.01)
        assert {replica for replica, *_ in server.asked} == set(range(len(off)))
    else:
        with pytest.raises(ParityError, match=expected):
            measure(run, server)


def test_a_bound_that_is_set_holds_for_every_dtype(tmp_path: Path) -> None:
    run = a_run(tmp_path, parity={"max_mean_abs_logprob": 0.01})
    with pytest.raises(ParityError, match=r"the bound is 0\.01"):
        measure(run, Server(BETWEEN, dtype="bfloat16"))


@pytest.mark.parametrize(("first", "later", "bound"), [(0.01, 0.29, "0.3"), (0.2, 0.59, "0.6"), (0.9, 0.99, "1")])
def test_a_quantized_server_is_held_to_three_times_its_first_mismatch_but_not_below_the_bound_of_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: float, later: float, bound: str
) -> None:
    caplog.set_level("INFO", "learner")
    probe = probe_of(a_run(tmp_path), server := Server(first, quantization="fp8 KV cache"))
    assert probe.measure(server, version=1) == pytest.approx(first, rel=0.01)  # type: ignore[arg-type]
    assert probe.pop_metrics()["parity/quantized_abs_logprob"] == pytest.approx(first, rel=0.01)
    assert f"quantizes (fp8 KV cache): its mean |Δ logprob| is {first}" in caplog.text
    assert f"allowing up to {bound} (" in caplog.text
    probe.check_fresh({server.endpoint: later})
    with pytest.raises(ParityError, match=rf"the bound is {bound} for .*float32 \(fp8 KV cache\) on the server"):
        probe.check_fresh({server.endpoint: float(bound) + 0.05})


def test_a_quantized_server_with_other_weights_is_refused_as_it_joins(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"of fixed sequences is 1\.2, the bound is 1 for"):
        measure(a_run(tmp_path), Server(1.2, quantization="fp8 KV cache"))


def test_a_bound_that_is_set_holds_for_a_quantized_server_too(tmp_path: Path) -> None:
    probe = probe_of(a_run(tmp_path, parity={"max_mean_abs_logprob": 0.02}), server := Server(0.01, quantization="fp8"))
    probe.measure(server, version=1)  # type: ignore[arg-type]
    with pytest.raises(ParityError, match=r"the bound is 0\.02"):
        probe.check_fresh({server.endpoint: 0.03})


def test_fresh_tokens_are_held_to_the_bound_of_the_server_that_they_come_from(tmp_path: Path) -> None:
    exact, coarse = Server(), Server(BETWEEN, dtype="bfloat16", endpoint="tcp://b:1")
    probe = probe_of(a_run(tmp_path), exact, coarse)
    for server in (exact, coarse):
        probe.measure(server, version=1)  # type: ignore[arg-type]
    probe.check_fresh({"tcp://a:1": 1e-4, "tcp://b:1": BETWEEN, "a server of before a restart": BETWEEN})
    for endpoint, mismatch in (("tcp://a:1", BETWEEN), ("tcp://b:1", BEYOND)):
        with pytest.raises(ParityError, match=rf"of fresh tokens is {mismatch}.*the server at {endpoint} has"):
            probe.check_fresh({"tcp://a:1": 0.0} | {endpoint: mismatch})
    assert probe.pop_metrics() == {"parity/abs_logprob": pytest.approx(BETWEEN)} and probe.pop_metrics() == {}


@pytest.mark.parametrize("partial", [{"top_p": 0.8}, {"top_k": 4}], ids=str)
def test_tokens_sampled_from_a_part_of_the_distribution_are_not_compared(
    tmp_path: Path, partial: dict[str, float]
) -> None:
    run = a_run(tmp_path, sampling=partial | {"allow_partial_support": True})
    probe = probe_of(run, server := Server())
    probe.measure(server, version=1)  # type: ignore[arg-type]
    probe.check_fresh({server.endpoint: 0.2})


def test_scores_of_another_version_are_no_scores(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="scored with version 0; expected version 1"):
        measure(a_run(tmp_path), Server(version=0))


@pytest.mark.parametrize("prompt_tokens", [5, 62])
def test_texts_fit_into_the_context_of_the_server(tmp_path: Path, prompt_tokens: int) -> None:
    server: Any = Server()
    probe_of(a_run(tmp_path), server, prompt_tokens=prompt_tokens).measure(server, version=1)
    assert all(48 <= length <= 63 for _, length, _ in server.asked) and len(server.asked) == 2


def test_nobody_waits_longer_than_the_patience_for_scores_while_others_are_ready(tmp_path: Path) -> None:
    busy = Server()
    busy.fail_with = DeadlineExceeded("it did not score")
    for others, straggler_timeout_s, timeout_s, key in (
        ([], 0.5, 20.0, "learner.weight_sync.timeout_s"),
        ([Server()], 0.5, 0.5, "learner.weight_sync.straggler_timeout_s"),
        ([Server()], 60.0, 10.0, "half of learner.weight_sync.timeout_s"),
    ):
        run = a_run(tmp_path, weight_sync={"timeout_s": 20, "straggler_timeout_s": straggler_timeout_s})
        with pytest.raises(DeadlineExceeded, match=rf"it did not score \({key}\)"):
            probe_of(run, busy, *others).measure(busy, version=1)  # type: ignore[arg-type]
        assert busy.asked[-1][2] == timeout_s


def test_a_dtype_without_a_bound_is_refused_and_another_one_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    run = a_run(tmp_path)
    for dtype in ("float32", "bfloat16"):
        server: Any = Server(dtype=dtype)
        check_dtype(run, server, server.welcome)
    (line,) = caplog.messages
    assert "computes in bfloat16 and this run in float32; allowing a mean |Δ logprob| of up to 0.3" in line
    half: Any = Server(dtype="float16")
    with pytest.raises(ConfigError, match=r"computes in float16 and this run in dtype = 'float32'.*server.dtype"):
        check_dtype(run, half, half.welcome)


# --- the first sync to a fresh server --------------------------------------------------------------------------------


def first_sync(run: LearnerRun, server: Any, change: float, replica: int = 0, noise: float = 0.0) -> bool:
    """Check a first sync that changes the logprobs of a replica by this; return whether they were compared."""
    probe, version = probe_of(run, server), 0
    server.version = None
    before = score_fresh_server(run, probe, server, version)
    if before is None:
        return False
    server.version = version
    server.off = tuple(off + change * (index == replica) for index, off in enumerate(server.off))
    check_identity(run, probe, server, msgspec.structs.replace(before, noise=noise), version)
    return True


@pytest.mark.parametrize(
    ("dtype", "change", "noise", "parity", "is_refused"),
    [
        ("float32", 0.0, 0.0, {}, False),
        ("float32", 1.5e-5, 0.0, {}, True),
        ("float32", 1.5e-5, 1e-5, {}, False),
        ("float32", 1.5e-5, 0.0, {"max_identity_abs_logprob": 1e-3}, False),
        ("bfloat16", 5e-4, 0.0, {}, False),
        ("bfloat16", 1.5e-3, 0.0, {}, True),
    ],
)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_first_sync_that_changes_logprobs_is_refused_unless_it_is_within_the_noise(
    tmp_path: Path, dtype: str, change: float, noise: float, parity: dict[str, Any], is_refused: bool, replica: int
) -> None:
    run, server = a_run(tmp_path, parity=parity), Server(0.0, 5e-4, dtype=dtype)
    if is_refused:
        expected = (
            rf"the first weight sync changed its logprobs by {change:.2g} .*for {dtype} .*max_identity_abs_logprob"
        )
        with pytest.raises(ParityError, match=expected):
            first_sync(run, server, change, replica)
    else:
        assert first_sync(run, server, change, replica, noise)


def test_the_noise_is_that_of_two_scorings_of_the_same_weights(tmp_path: Path) -> None:
    class Noisy(Server):
        def score(self, token_ids: list[int], timeout_s: float, replica: int) -> Scores | Exception:
            self.off = (2e-4 * (len(self.asked) >= 2),)  # from the second scoring of the two texts on
            return super().score(token_ids, timeout_s, replica)

    run, server = a_run(tmp_path), Noisy(version=None)
    fresh = score_fresh_server(run, probe_of(run, server), server, 0)  # type: ignore[arg-type]
    assert fresh is not None and fresh.noise == pytest.approx(2e-4, rel=0.01)


@pytest.mark.parametrize(
    ("ours", "theirs", "learner", "is_untouched", "version"),
    [
        pytest.param("float32", "float32", {"warm_start": {"steps": 2}}, True, 0, id="after a warm start"),
        pytest.param("float32", "float32", {}, False, 0, id="a server that has had a run's weights"),
        pytest.param("float32", "float32", {}, True, 3, id="a resumed run"),
        pytest.param("bfloat16", "float32", {}, True, 0, id="a server that is finer than the wire"),
    ],
)
def test_a_server_that_has_not_loaded_what_is_sent_is_not_compared(
    tmp_path: Path, ours: str, theirs: str, learner: dict[str, Any], is_untouched: bool, version: int
) -> None:
    run, server = a_run(tmp_path, ours, **learner), Server(dtype=theirs, is_untouched=is_untouched)
    assert score_fresh_server(run, probe_of(run, server), server, version) is None and server.asked == []  # type: ignore[arg-type]
