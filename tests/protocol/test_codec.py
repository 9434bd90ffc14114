"""The codec round-trips every message and rejects everything else."""

import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import Decoder, decode, encode, pack, unpack
from protocol.errors import ProtocolError
from protocol.messages import Completion, Generate, Group, LearnerMessage, Sampling, ServerInfo, ServerMessage
from tests.fingerprint import MODEL

finite_float32 = st.floats(width=32, allow_nan=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    logprobs = draw(st.lists(finite_float32, max_size=20))
    num_tokens = len(logprobs)
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens))
    split = draw(st.integers(0, num_tokens))
    versions = [(version, count) for version, count in [(4, split), (7, num_tokens - split)] if count]
    return Completion(
        token_ids=np.array(token_ids, np.int32), behavior_logprobs=np.array(logprobs, np.float32), versions=versions,
        finish_reason="stop",
    )  # fmt: skip


@given(st.lists(completions(), max_size=5), st.text(st.characters(categories=["L", "N"]), max_size=20))
def test_a_group_survives_the_wire_bit_for_bit(sent: list[Completion], group_id: str) -> None:
    frames = [bytes(frame) for frame in encode(Group(group_id=group_id, entered_version=4, completions=sent))]
    received = decode(frames, ServerMessage)
    assert isinstance(received, Group) and received.group_id == group_id
    for before, after in zip(sent, received.completions, strict=True):
        assert before.token_ids.tobytes() == after.token_ids.tobytes()
        assert before.behavior_logprobs.tobytes() == after.behavior_logprobs.tobytes()
        assert before.versions == after.versions


@given(st.integers(0, 5), st.sampled_from(["u1", "<u2"]))
def test_routed_experts_keep_their_shape_and_are_left_out_if_there_are_none(num_tokens: int, dtype: str) -> None:
    def completion(experts: np.ndarray | None) -> Completion:
        tokens, logprobs = np.zeros(num_tokens + 1, np.int32), np.zeros(num_tokens + 1, np.float32)
        return Completion(
            token_ids=tokens, behavior_logprobs=logprobs, versions=[(0, num_tokens + 1)], finish_reason="stop",
            experts=experts,
        )  # fmt: skip

    experts = np.arange(num_tokens * 6).astype(dtype).reshape(num_tokens, 3, 2)
    sent = Group(group_id="g", entered_version=0, completions=[completion(experts)], prompt_experts=experts[:1])
    received = unpack(pack(sent), Group)
    for before, after in ((sent.prompt_experts, received.prompt_experts), (experts, received.completions[0].experts)):
        assert after is not None and after.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(before, after)
    without = encode(Group(group_id="g", entered_version=0, completions=[completion(None)]))
    assert b"experts" not in without[0] and b"experts" not in encode(generate())[0] and len(without) == 3


def generate() -> Generate:
    sampling = Sampling(num_completions=2, max_tokens=4)
    return Generate(group_id="3.0", prompt_token_ids=np.arange(5, dtype=np.int32), sampling=sampling, deadline_s=1.0)


def test_a_stored_message_is_the_sent_one() -> None:
    stored = unpack(pack(generate()), Generate)
    assert stored.prompt_token_ids.tolist() == [0, 1, 2, 3, 4] and stored.sampling == generate().sampling


@pytest.mark.parametrize("packed", [b"", pack(generate())[:-1], pack(generate()) + b"x", b"\x91" * 100_000])
def test_invalid_stored_bytes_are_a_protocol_error(packed: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"Expected the frames of Generate or Group\. Resume with"):
        unpack(packed, Generate | Group)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=50), max_size=4))
def test_garbage_is_only_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames, LearnerMessage)


@given(st.data())
def test_a_damaged_message_is_rejected_or_still_valid(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(generate())]
    frame = frames[data.draw(st.integers(0, len(frames) - 1))]
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode([bytes(frame) for frame in frames], LearnerMessage)
    except ProtocolError:
        return
    assert isinstance(message, LearnerMessage)


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda frames: frames[:-1], "no frame fits"),
        (lambda frames: [*frames, b""], "received 2 array frames, but the header announces 1"),
        (lambda frames: [], "without frames"),
        (lambda frames: [frames[0], frames[1] + b"\0\0\0\0"], r"no frame fits.*'int32', 5.*\[24\] bytes"),
        (lambda frames: [frames[0], frames[1] + b"\0"], r"no frame fits.*'int32', 5.*\[21\] bytes"),
        (lambda frames: [frames[0].replace(b"int32", b"int64"), frames[1]], "no frame fits"),
        (lambda frames: [frames[0].replace(b"Generate", b"Delete!!"), frames[1]], "Delete!!"),
        (lambda frames: encode(Group(group_id="g", entered_version=0, completions=[])), "Group"),
    ],
)
def test_frames_that_contradict_the_header_are_rejected_and_the_next_are_decoded(tamper, expected: str) -> None:
    decoder, frames = Decoder(LearnerMessage), [bytes(frame) for frame in encode(generate())]
    with pytest.raises(ProtocolError, match=expected):
        decoder.decode(tamper(frames))
    assert isinstance(decoder.decode(frames), Generate)


TOKEN_IDS = [
    [1, "int32", 3], [-1, "int32", 3], ["0", "int32", 3], [0, "int32", 3.0], [0, "int32"], "012", None,
    [0, "int32", [3, 1]], [0, "int32", [-3]], [0, "int32", [-1, -3]], [0, "int32", []], [0, "int32", [2, 2]],
    [0, "int32", 2**64 - 1], [0, "int32", [3, 1, 1, 1]],
]  # fmt: skip


@pytest.mark.parametrize("announced", TOKEN_IDS)
def test_each_frame_is_announced_once_in_order(announced: object) -> None:
    def frames_of(token_ids: object) -> list[bytes]:
        completion = {
            "token_ids": token_ids, "behaviour_logprobs": [1, "float32", 3], "versions": [[1, 3]],
            "finish_reason": "stop"
        }  # fmt: skip
        header = {"type": "Group", "group_id": "1.0", "entered_version": 1, "completions": [completion]}
        return [msgspec.msgpack.encode(header), bytes(12), bytes(12)]

    assert isinstance(decode(frames_of([0, "int32", 3]), ServerMessage), Group)
    with pytest.raises(ProtocolError, match="not a valid message"):
        decode(frames_of(announced), ServerMessage)


SCORE = {"type": "Score", "request_id": "r", "token_ids": [0, "int32", 0], "deadline_s": 1.0}
BEGIN = {"type": "PushBegin", "session": "e", "version": 1}
TENSOR = {"name": "w", "shape": [2], "dtype": "float32"}


@pytest.mark.parametrize(
    "wrong",
    [
        SCORE | {"deadline_s": float("nan")},
        SCORE | {"deadline_s": 0.0},
        SCORE | {"request_id": "of\ntwo lines"},
        SCORE | {"request_id": "x" * 257},
        SCORE | {"unknown_field": 1},
        BEGIN | {"version": -1},
        BEGIN | {"version": 2**53},
        BEGIN | {"manifest": {"tensors": [TENSOR | {"shape": [-2]}], "bucket_bytes": 1}},
        BEGIN | {"manifest": {"tensors": [TENSOR | {"dtype": "load"}], "bucket_bytes": 1}},
    ],
)
def test_an_unusable_value_is_rejected(wrong: dict) -> None:
    with pytest.raises(ProtocolError, match="not a valid message"):
        decode([msgspec.msgpack.encode(wrong), b""][: 1 + ("token_ids" in wrong)], LearnerMessage)


def test_an_announced_shape_is_not_multiplied_if_it_has_too_many_dimensions() -> None:
    header = SCORE | {"token_ids": [0, "int32", [2**63] * 50_000]}
    started = time.process_time()
    with pytest.raises(ProtocolError, match="no frame fits"):
        decode([msgspec.msgpack.encode(header), b""], LearnerMessage)
    assert time.process_time() - started < 1.0


def test_a_message_nested_deeper_than_the_decoders_stack_is_rejected() -> None:
    header = b"\x82\xa4type\xa5Score\xa9token_ids" + b"\x91" * 100_000
    with pytest.raises(ProtocolError, match="recursion"):
        decode([header], LearnerMessage)


def test_an_error_is_short_and_on_one_line_for_any_quoted_value() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode([msgspec.msgpack.encode({"type": "x\n" * 1_000_000})], LearnerMessage)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_a_doctor_of_an_earlier_protocol_version_can_read_the_version_of_a_server() -> None:
    server_info = ServerInfo(
        probe_id="p", protocol_version=11, package_version="1", clock_s=0.0, run=None, model=MODEL, dtype="float32",
        transports=["tcp"], devices=["cpu"],
    )  # fmt: skip
    of_version_10 = {
        "type", "probe_id", "protocol_version", "package_version", "clock_s", "run", "model", "dtype", "transports",
        "devices",
    }  # fmt: skip
    assert msgspec.msgpack.decode(encode(server_info)[0]).keys() == of_version_10


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "3 token ids but 2 behavior logprobs"),
        ({"versions": [(1, 2)]}, "do not cover 3 tokens"),
        ({"versions": [(1, 3), (2, 0)]}, "do not cover 3 tokens"),
        ({"token_ids": np.zeros(3, np.int64)}, "flat int32"),
        ({"experts": np.zeros((3, 1, 1), np.uint8)}, "routed experts of 3 tokens, expected all but the last of 3"),
        ({"experts": np.zeros((2, 1), np.uint8)}, "3 dimensions, got 2-d uint8"),
        ({"experts": np.zeros((2, 1, 1), np.int32)}, "got 3-d int32"),
    ],
)
def test_an_inconsistent_completion_cannot_be_created(fields, expected: str) -> None:
    arrays = {"token_ids": np.zeros(3, np.int32), "behavior_logprobs": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=expected):
        Completion(**({"versions": [(1, 3)], "finish_reason": "stop"} | arrays | fields))
