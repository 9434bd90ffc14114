"""Malformed messages: real messages that are truncated, oversized, damaged, mistyped, nested or replayed.

The seed reproduces a message that did harm.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from protocol.codec import encode
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Completion,
    Farewell,
    Generate,
    Group,
    GroupFailed,
    Hello,
    Manifest,
    Probe,
    Pulse,
    PushAbort,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Rendezvous,
    Sampling,
    Score,
    Scores,
    ServerInfo,
    TensorSpec,
    Trial,
    TrialResult,
    Welcome,
)
from tests.fingerprint import MODEL

Frames = list[bytes]

IDS = np.arange(6, dtype=np.int32)
LOGPROBS = np.full(6, -0.5, np.float32)
RENDEZVOUS = Rendezvous(transport="tcp", host="127.0.0.1", port=1, world_size=2, timeout_s=0.1)
MANIFEST = Manifest(tensors=(TensorSpec(name="w", shape=(2, 3), dtype="float32"),), bucket_bytes=1 << 20)
COMPLETION = Completion(token_ids=IDS, behavior_logprobs=LOGPROBS, versions=[(0, 6)], finish_reason="stop")

TO_SERVER = [
    Hello(run="another", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="another"),
    Generate(group_id="7.0", prompt_token_ids=IDS, sampling=Sampling(num_completions=2, max_tokens=4), deadline_s=5.0),
    Score(request_id="s", token_ids=IDS, deadline_s=5.0),
    Ack(group_ids=["7.0", "8.0"]),
    Cancel(group_ids=["7.0"]),
    PushBegin(session="e", version=3, rendezvous=RENDEZVOUS, manifest=MANIFEST),
    PushAbort(session="e"),
    Farewell(is_over=True),
]
DOCTOR_MESSAGES = [Probe(probe_id="p"), Trial(trial_id="t", rendezvous=RENDEZVOUS, num_bytes=1)]
"""Messages that the server answers for any peer."""
TO_LEARNER = [
    Welcome(
        server_id="s", policy_version=3, num_workers=1, dtype="float32", transports=["tcp"], devices=["cpu"],
        max_model_len=64, max_concurrent_sequences=8, is_untouched=False,
    ),
    Pulse(server_id="s", policy_version=3, groups_running=1, groups_unacked=1, tokens_generated=9, idle_s=0.5),
    Group(group_id="unasked", entered_version=3, completions=[COMPLETION, COMPLETION]),
    GroupFailed(group_id="unasked", code="deadline", message="late", retryable=True),
    GroupFailed(group_id="unasked", code="draining", message="it ends", retryable=True),
    Scores(request_id="unasked", logprobs=LOGPROBS, policy_version=3),
    PushReady(session="e", version=3),
    PushDone(session="e", version=3, checksum="f", pause_s=0.0, receive_s=0.0, load_s=0.0, stall_s=0.0),
    PushFailed(session="e", version=3, state="receiving", message="no", weights_intact=True),
    ServerInfo(
        probe_id="p", protocol_version=PROTOCOL_VERSION, package_version="0", clock_s=0.0, run=None, model=MODEL,
        dtype="float32", transports=["tcp"], devices=["cpu"],
    ),
    TrialResult(trial_id="t", error="no"),
]  # fmt: skip

WRONG_VALUES: list[Any] = [
    None, True, -1, 2**63, -(2**63), 1e308, float("nan"), float("-inf"), "", "x" * 1000, b"\xff" * 9, [], [[]], {},
    {"": 0},
    [0, "int32", 6], [0, "float32", 2**40], [-1, "int32", 0], [1, "object", 1], [[0]], "\n\x1b[31m", "…" * 300,
]  # fmt: skip
NESTED = b"\x91" * 5_000 + b"\x90"


def malformed_messages(messages: list[msgspec.Struct], seed: int) -> Iterator[Frames]:
    """Yield malformed, wrong and replayed messages forever. Some still decode, but are meaningless."""
    chance = random.Random(seed)
    real = [[bytes(frame) for frame in encode(message)] for message in messages]
    while True:
        yield chance.choice(MUTATIONS)(list(chance.choice(real)), chance)


def truncated(frames: Frames, chance: random.Random) -> Frames:
    if len(frames) > 1 and chance.random() < 0.5:
        return frames[: chance.randrange(1, len(frames))]
    index = chance.randrange(len(frames))
    frames[index] = frames[index][: chance.randrange(len(frames[index]) or 1)]
    return frames


def oversized(frames: Frames, chance: random.Random) -> Frames:
    if chance.random() < 0.5:
        return frames + [bytes(chance.randrange(100))] * chance.randrange(1, 20)
    index = chance.randrange(len(frames))
    frames[index] += bytes(chance.choice([1, 4, 4000]))
    return frames


def damaged(frames: Frames, chance: random.Random) -> Frames:
    index = chance.randrange(len(frames))
    frame = bytearray(frames[index] or b"\0")
    for _ in range(chance.randrange(1, 4)):
        frame[chance.randrange(len(frame))] = chance.randrange(256)
    frames[index] = bytes(frame)
    return frames


def wrong_types_and_shapes(frames: Frames, chance: random.Random) -> Frames:
    header = msgspec.msgpack.decode(frames[0])
    where: Any = header
    while True:
        key = chance.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if not (isinstance(where[key], dict | list) and where[key] and chance.random() < 0.7):
            break
        where = where[key]
    where[key] = chance.choice(WRONG_VALUES)
    return [msgspec.msgpack.encode(header), *frames[1:]]


def nested(frames: Frames, chance: random.Random) -> Frames:
    """Replace a value by one that is nested deeper than any decoder's stack."""
    header = msgspec.msgpack.decode(frames[0])
    name = chance.choice(list(header))
    fields = b"".join(
        msgspec.msgpack.encode(key) + (NESTED if key == name else msgspec.msgpack.encode(value))
        for key, value in header.items()
    )
    return [bytes([0x80 + len(header)]) + fields, *frames[1:]]


def replayed(frames: Frames, chance: random.Random) -> Frames:
    return frames


MUTATIONS: list[Callable[[Frames, random.Random], Frames]] = [
    truncated, oversized, damaged, wrong_types_and_shapes, nested, replayed,
]  # fmt: skip
