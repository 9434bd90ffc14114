"""Key files: created once with owner-only access, and rejected if others can read them."""

import stat
from pathlib import Path

import pytest
import zmq

from protocol.channel.keys import learner_keys, main, make_keys, server_keys
from protocol.errors import ConfigError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_the_command_creates_keys_that_only_their_owner_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path / "keys")])
    printed = capsys.readouterr().out
    assert "learner.key" in printed
    for path in [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    server, learner = server_keys(str(tmp_path / "keys")), learner_keys(str(tmp_path / "keys"))
    assert learner.server == server.public and server.allowed() == {learner.public}
    assert zmq.curve_public(server.secret) == server.public and server.secret != learner.secret
    assert server.secret.decode() not in printed and learner.secret.decode() not in printed
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "keys")])
    assert "never overwritten" in capsys.readouterr().err
    assert server_keys(str(tmp_path / "keys")) == server


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_access_is_rejected_with_a_remedy(keys: Path, mode: int) -> None:
    for name, read in (("server.key", server_keys), ("learner.key", learner_keys)):
        (keys / name).chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600 {keys / name}"):
            read(str(keys))


def test_files_without_a_key_are_errors_with_the_file(keys: Path) -> None:
    (keys / "server.pub").write_text("not a key\n")
    with pytest.raises(ConfigError, match=r"server\.pub is not a valid key: it has 9 characters; expected 40"):
        learner_keys(str(keys))
    (keys / "learner.key").write_text('"' * 40)
    with pytest.raises(ConfigError, match=r"learner\.key is not a valid key"):
        learner_keys(str(keys))
    (keys / "server.key").write_text("")
    with pytest.raises(ConfigError, match=r"server\.key .* is empty"):
        server_keys(str(keys))
    with pytest.raises(ConfigError, match=r"keys = '.*none' cannot be read"):
        server_keys(str(keys / "none"))


def test_a_server_without_allowed_keys_does_not_start(keys: Path) -> None:
    (keys / "allowed" / "learner.pub").unlink()
    with pytest.raises(ConfigError, match="contains no public key, so no learner can connect"):
        server_keys(str(keys))
