"""Where the learner listens for pushes, and by which address it is called: what may be said, and what is refused with the reason."""

import pytest
from msgspec import ValidationError, convert

from learner.config import WeightSyncConfig


def config(**keys: str) -> WeightSyncConfig:
    return convert({"transport": "tcp"} | keys, WeightSyncConfig)


def test_a_port_a_range_and_an_address_alone_are_read() -> None:
    assert list(config().port_range()) == [0]
    assert list(config(ports="65535").port_range()) == [65535]
    assert list(config(ports="29500-29502").port_range()) == [29500, 29501, 29502]
    for address in ("learner.example", "10.0.0.7", "fd00::7"):
        assert config(advertise=address).advertise == address


@pytest.mark.parametrize("ports", ["", "0", "5-4", "1-65536", "29500-", "29500, 29501"])
def test_what_names_no_port_is_refused(ports: str) -> None:
    with pytest.raises(ValidationError, match=f'ports = "{ports}" is not a port or a range of ports from 1 to 65535'):
        config(ports=ports)


@pytest.mark.parametrize("advertise", ["", "tcp://10.0.0.7", "[fd00::7]"])
def test_an_address_with_anything_around_it_is_refused(advertise: str) -> None:
    with pytest.raises(ValidationError, match="is not a host name or an address alone"):
        config(advertise=advertise)
