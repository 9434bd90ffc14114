"""Where the learner listens for pushes, and by which address it is called: what may be said, and what is refused with the reason."""

import pytest
from msgspec import ValidationError, convert

from learner.config import WeightSyncConfig


@pytest.mark.parametrize(
    ("ports", "expected"),
    [(None, [0]), ("29500", [29500]), ("29500-29502", [29500, 29501, 29502]), ("65535", [65535])],
)
def test_a_port_or_a_range_is_read(ports: str | None, expected: list[int]) -> None:
    assert list(convert({"transport": "tcp", "ports": ports}, WeightSyncConfig).port_range()) == expected


@pytest.mark.parametrize("ports", ["", "0", "65536", "5-4", "1-65536", "http", "29500-", "-5", "29500, 29501"])
def test_what_names_no_port_is_refused(ports: str) -> None:
    with pytest.raises(ValidationError, match=f'ports = "{ports}" is not a port or a range of ports from 1 to 65535'):
        convert({"transport": "tcp", "ports": ports}, WeightSyncConfig)


@pytest.mark.parametrize("advertise", ["", "tcp://10.0.0.7", "[fd00::7]"])
def test_an_address_is_advertised_without_anything_around_it(advertise: str) -> None:
    with pytest.raises(ValidationError, match="is not a host name or an address alone"):
        convert({"transport": "tcp", "advertise": advertise}, WeightSyncConfig)
    for fine in ("learner.example", "10.0.0.7", "fd00::7"):
        assert convert({"transport": "tcp", "advertise": fine}, WeightSyncConfig).advertise == fine
