"""Agree on the secret with which ranks sign their messages."""

from __future__ import annotations

import os

from moe_conformance.engine import EngineError, store
from moe_conformance.engine.remote import secret

VARIABLE = "MOE_CONFORMANCE_TOKEN"  # the same as in runs under a launcher
_KEY = "path of the secret"


def new() -> str:
    """Return a new random secret, for ranks that are forked from this process."""
    return os.urandom(32).hex()


def agreed(rank: int, world: int, address: str, port: int) -> bytes:
    """Return the secret of all ranks: from the environment, or from a private file that rank 0 writes.

    Raises:
        EngineError: there are several machines and no secret that they could share, or the file is not private.
    """
    if given := os.environ.get(VARIABLE):
        return secret.checked(given, VARIABLE)
    if os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        raise EngineError(f"set {VARIABLE} to the same secret on all machines, for example of `openssl rand -hex 32`")
    shared = store.join(address, port, "moe-conformance")
    if rank > 0:
        found = secret.read(bytes(shared.get(_KEY)).decode())
        shared.set(f"{_KEY}/{rank}", "read")
        return found
    file = secret.SecretFile()
    try:
        shared.set(_KEY, file.path)
        for other in range(1, world):
            shared.get(f"{_KEY}/{other}")  # waits for it
    finally:
        file.remove()
    return file.secret
