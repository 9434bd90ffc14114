"""The server list in a file or a DNS name, which stays unchanged when unreadable; and the choice of the next server."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.servers.membership import EndpointSource, Load, least_loaded
from protocol.errors import ConfigError

ONE, OTHER = "tcp://127.0.0.1:6001", "tcp://127.0.0.1:6002"


def of(source: str) -> EndpointSource:
    return EndpointSource(source, has_keys=False, insecure=False)


def test_a_file_has_one_endpoint_per_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text(f"# two\n\n{ONE}\n  {OTHER} # the second\n{ONE}\n")
    assert of(f"file:{file}").endpoints == (ONE, OTHER)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "# all gone\n",
        "not an endpoint\n",
        "tcp://10.0.0.5:6001\n",
        None,
        "tcp://localhost:*\n",
        "tcp://127.0.0.1 :6001\n",
        "tcp://127.0.0.1..:6001\n",
    ],
)
def test_an_empty_invalid_or_missing_list_keeps_the_servers_and_is_reported_once(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "servers.txt"
    file.write_text(ONE)
    membership = of(f"file:{file}")
    file.unlink() if content is None else file.write_text(content)
    assert membership.reread() == membership.reread() == (ONE,)
    assert len(caplog.messages) == 1 and "keeping the current servers" in caplog.text
    file.write_text(OTHER)
    assert membership.reread() == (OTHER,)


def test_a_dns_name_means_each_of_its_addresses() -> None:
    assert of("dns:localhost:6001").endpoints == (ONE,)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("servers.txt", "use file:PATH .* or dns:NAME:PORT"),
        ("file:/nowhere/servers.txt", "cannot be read"),
        ("dns:localhost", "use dns:NAME:PORT"),
        ("dns:a..b:6001", "use dns:NAME:PORT"),
        ("dns:no-such-host.invalid:6001", "has no address"),
    ],
)
def test_a_source_without_servers_is_rejected_at_the_start(source: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        of(source)


LOADS = st.lists(st.builds(Load, st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)


@given(LOADS)
def test_the_server_with_the_fewest_pending_groups_is_chosen_and_ties_rotate(loads: list[Load]) -> None:
    index = least_loaded(loads)
    assert index is not None
    fewest = [load for load in loads if load.num_groups == min(load.num_groups for load in loads)]
    assert loads[index] in fewest and loads[index].chosen_at == min(load.chosen_at for load in fewest)


@given(LOADS, st.data())
def test_a_later_turn_stays_on_its_server_up_to_two_more_pending_groups(loads: list[Load], data: st.DataObject) -> None:
    stays_at = data.draw(st.integers(0, len(loads) - 1))
    fewest = min(load.num_groups for load in loads)
    may_stay = loads[stays_at].num_groups - fewest <= 2
    assert least_loaded(loads, stays_at) == (stays_at if may_stay else least_loaded(loads))


def test_without_servers_none_is_chosen() -> None:
    assert least_loaded([]) is None
