"""CURVE keys of the server and of the learners that it admits.

    DIR/server.key            the server's secret key     stays on the server
    DIR/server.pub            the server's public key     goes to every learner
    DIR/learner.key           a learner's secret key      goes to that learner
    DIR/allowed/learner.pub   an admitted public key      stays on the server, one file per learner

`slipstream keys DIR` creates them. The server reads allowed/ at each handshake. Public keys
follow from secret keys, so neither side needs a file of its own public key.
Invariant: secrets, including the key of the OpenAI API, are read only from files that no other user can read.
"""

import errno
import logging
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from protocol import console
from protocol.errors import ConfigError

log = logging.getLogger(__name__)
KEY_CHARACTERS = 40
"""Length of a key: 32 bytes in Z85."""
TEMPORARY_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors that tell nothing about a file: of this process, the machine or the file system."""


def read_secret(path: Path, purpose: str) -> str:
    """Return the stripped text of a secret file.

    Raises:
        ConfigError: The file is not a readable regular file, is empty, or is open to group or others.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block until a writer opens it too
            raise ConfigError(f"{path} ({purpose}) is not a regular file; use a regular file that holds the secret")
        mode, text = status.st_mode & 0o777, path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} ({purpose}) cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{path} ({purpose}) has mode {mode:03o}, so others can access it; run: chmod 600 {path}")
    if not text:
        raise ConfigError(f"{path} ({purpose}) is empty; write a secret into it")
    return text


def write_secret(path: Path, text: str) -> None:
    """Create the file with mode 600.

    Raises:
        FileExistsError: The file exists, because a secret is never overwritten.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")


class ServerKeys(msgspec.Struct, frozen=True):
    """The server's key pair, and the directory of the public keys that it admits.

    Keys are Z85 text in bytes, as ZeroMQ takes them.
    """

    secret: bytes
    public: bytes
    allowed_in: Path

    def allowed(self) -> set[bytes]:
        """Return the public keys that are admitted now.

        A file without a valid key, such as a partial copy, admits nobody and is logged.

        Raises:
            OSError: It is not known now which keys are admitted.
        """
        try:
            names = os.listdir(self.allowed_in)  # Path.glob hides errors of the system
        except FileNotFoundError:
            return set()
        keys = set()
        for path in sorted(self.allowed_in / name for name in names if name.endswith(".pub")):
            try:
                keys.add(_read_public(path))
            except ConfigError as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in TEMPORARY_ERRORS:
                    raise error.__cause__ from error
                log.warning("%s", error)
        return keys


class LearnerKeys(msgspec.Struct, frozen=True):
    """A learner's key pair, and the public key of its server."""

    secret: bytes
    public: bytes
    server: bytes


def server_keys(directory: str) -> ServerKeys:
    """Read the server's key pair, and check that a learner could connect.

    Raises:
        ConfigError: The key pair cannot be read, or no public key is admitted.
    """
    secret, public = _read_pair(_folder(directory) / "server.key")
    keys = ServerKeys(secret, public, Path(directory) / "allowed")
    try:
        allowed = keys.allowed()
    except OSError as error:
        raise ConfigError(f"{keys.allowed_in} cannot be read: {error}") from error
    if not allowed:
        raise ConfigError(
            f"{directory}/allowed contains no public key, so no learner can connect; copy the learner's .pub file there"
        )
    return keys


def learner_keys(directory: str) -> LearnerKeys:
    """Read a learner's key pair and the public key of its server.

    Raises:
        ConfigError: A key cannot be read.
    """
    secret, public = _read_pair(_folder(directory) / "learner.key")
    return LearnerKeys(secret, public, _read_public(Path(directory) / "server.pub"))


def make_keys(directory: Path) -> None:
    """Create the keys of a server and of one learner in a new directory.

    Raises:
        ConfigError: The directory exists.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise ConfigError(
            f"{directory} exists, and keys are never overwritten; use its keys or choose another directory"
        ) from error
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}; choose another directory") from error
    (directory / "allowed").mkdir(mode=0o700)
    server_public, server_secret = zmq.curve_keypair()
    learner_public, learner_secret = zmq.curve_keypair()
    write_secret(directory / "server.key", server_secret.decode())
    write_secret(directory / "server.pub", server_public.decode())
    write_secret(directory / "learner.key", learner_secret.decode())
    write_secret(directory / "allowed" / "learner.pub", learner_public.decode())


def _folder(directory: str) -> Path:
    """Return the path of a key directory.

    Raises:
        ConfigError: It is not a directory, or this user may not enter it.
    """
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(directory, os.X_OK, effective_ids=True):  # permission to list is not needed
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"keys = {directory!r} cannot be read ({error.strerror}); use a directory that `slipstream keys keys` "
            "created and that this user can access"
        ) from error
    return Path(directory)


def _read_pair(path: Path) -> tuple[bytes, bytes]:
    secret = _checked(read_secret(path, "a secret key created by `slipstream keys keys`"), path)
    return secret, zmq.curve_public(secret)


def _read_public(path: Path) -> bytes:
    try:
        return _checked(path.read_text("utf-8").strip(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} (a public key created by `slipstream keys keys`) cannot be read: {error}") from error


def _checked(text: str, path: Path) -> bytes:
    key = text.encode()
    try:
        if len(key) != KEY_CHARACTERS:
            raise ValueError(f"it has {len(key)} characters")
        zmq.curve_public(key)  # fails if the text is not Z85
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"{path} is not a valid key: {error}; expected {KEY_CHARACTERS} Z85 characters, as `slipstream keys keys` "
            "writes them"
        ) from error
    return key


def main(arguments: Sequence[str] | None = None) -> None:
    with console.exit_on_user_error():
        parser = console.ArgumentParser("slipstream keys", "Make the CURVE keys of a server and of one learner.")
        parser.add_argument("directory", type=Path, metavar="DIR", help="new directory of the keys")
        directory = parser.parse_args(console.pop_switches(sys.argv[1:] if arguments is None else arguments)).directory
        make_keys(directory)
        print(
            f'created keys in {directory}; set keys = "{directory}" in the config of both sides\n'
            f"  the server keeps   {directory}/server.key and {directory}/allowed/\n"
            f"  the learner needs  {directory}/learner.key and {directory}/server.pub: copy them (scp -p), "
            "then delete learner.key here\n"
            "  another learner    creates its own keys and uses this server.pub; copy its allowed/learner.pub to\n"
            f"                     {directory}/allowed/ under another name, even while the server runs"
        )


if __name__ == "__main__":
    main()
