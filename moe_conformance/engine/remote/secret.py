"""The secret of one job: set by the user or, on one machine, generated and passed in a private file."""

from __future__ import annotations

import os
import stat
import tempfile

from ..records import EngineError

_LEAST = 16  # characters
_SIZE = 64


def checked(given: str, name: str) -> bytes:
    """Returns the secret that the user set as bytes; `name` is the variable that holds it.

    Raises:
        EngineError: it is too short.
    """
    if len(given) < _LEAST:
        raise EngineError(
            f"{name} has {len(given)} characters; give at least {_LEAST}, for example of `openssl rand -hex 32`"
        )
    return given.encode()


class SecretFile:
    """A new secret in a file that only this user can read, until `remove`.

    Attributes:
        path: Where it is, for the other processes of the machine.
        secret: What is in it.
    """

    def __init__(self) -> None:
        self.secret: bytes = os.urandom(_SIZE // 2).hex().encode()
        handle, self.path = tempfile.mkstemp(prefix="ranks-secret-")  # of mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(self.secret)

    def remove(self) -> None:
        """Deletes the file; idempotent."""
        if os.path.exists(self.path):
            os.unlink(self.path)


def read(path: str) -> bytes:
    """Returns the secret in a file that another process of this user wrote.

    Raises:
        EngineError: there is no such file, or another user could have written or read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise EngineError(f"the secret of this job cannot be read: {error}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
            raise EngineError(f"{path} is not a private file of this user, so that it holds no secret")
        secret = file.read(_SIZE + 1)
    if len(secret) != _SIZE:
        raise EngineError(f"{path} does not hold a secret of this job")
    return secret
