"""Reads what a launcher such as torchrun sets in the environment, and connects its processes to the driver.

Under torchrun the driver publishes its address in torchrun's store. A launcher without a store (srun with RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT set) leaves MASTER_PORT free: the driver listens there. The store is not
trusted: the process at that address must still prove that it knows the secret.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

# Public as torch.distributed.TCPStore, but type checkers find it only here.
from torch._C._distributed_c10d import TCPStore

from ..records import EngineError
from . import secret, sockets
from .handshake import client_handshake
from .listener import Listener

FIND_LIMIT_S = 300.0  # until the driver listens: machines import at different speed
_STEP_LIMIT_S = 30.0  # for what the driver does at once


@dataclass(frozen=True)
class Launch:
    """The position of this process among those of one launcher.

    Attributes:
        rank: Its number; 0 is the driver's.
        size: How many processes there are.
        local_rank: Its number on its machine.
        local_size: How many processes are on its machine; 0 if the launcher does not say.
        address: A name or address of the driver's machine.
        port: The port of the store, or a free one for the driver.
        store: Whether the launcher has a store at `address` and `port`.
        run: The part of the keys in that store that distinguishes this run from others.
        restarts: How often the launcher has restarted its processes.
        node: The number of the machine, for messages.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    store: bool
    run: str
    restarts: int
    node: str

    @property
    def on_one_machine(self) -> bool:
        """True if the launcher says that all processes are on one machine."""
        return self.local_size == self.size


@dataclass(frozen=True)
class UserSecret:
    """The secret that the user has set for all processes, or None, and the name of its variable."""

    value: str | None
    variable: str


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Reads the environment; returns None if no launcher has started this process.

    Raises:
        EngineError: something is missing or no number, or the launcher has restarted its processes.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise EngineError(f"RANK and WORLD_SIZE are set, {name} is not; set it as torchrun does, or unset RANK")
    size = _number(environment, "WORLD_SIZE", least=1)
    restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", least=0, default=0)
    launch = Launch(
        rank=_number(environment, "RANK", least=0),
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", least=0, default=0),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", least=0, default=0),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", least=1),
        store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run=f"{environment.get('TORCHELASTIC_RUN_ID', 'none')}/{restarts}",
        restarts=restarts,
        node=environment.get("GROUP_RANK", ""),
    )
    if launch.rank >= launch.size:
        raise EngineError(f"RANK is {launch.rank}, but WORLD_SIZE only {launch.size}")
    if launch.restarts:
        raise EngineError(
            "torchrun has restarted its processes after one ended; a run does not begin anew: use --max-restarts 0"
        )
    return launch


def announce(launch: Launch, given: UserSecret) -> tuple[Listener, secret.SecretFile | None]:
    """Opens the driver's listener and publishes its address for the other processes.

    Returns the listener and, if the user gave no secret, the file with one, to be removed once all agents are
    connected.

    Raises:
        EngineError: there is no secret that processes on several machines could share, or the address is not
            one of this machine's.
    """
    file = _own_secret(launch, given)
    try:
        listener = _listen(launch, _checked(given) if file is None else file.secret)
        if launch.store:
            where = {"address": listener.address, "port": listener.port, "secret": file.path if file else None}
            _store(launch).set(_key(launch), json.dumps(where))
    except BaseException:
        if file is not None:
            file.remove()
        raise
    return listener, file


@dataclass(frozen=True)
class Driver:
    """The address of the driver's listener, and the secret."""

    address: str
    port: int
    secret: bytes

    def connect(self, subject: bytes, patience_s: float = _STEP_LIMIT_S) -> socket.socket:
        """Connects to the driver, and returns after the handshake.

        Args:
            subject: What the connection is for.
            patience_s: How long to wait until the driver listens, and again until it greets.

        Raises:
            EngineError: nothing listens there, it is not the driver, or it is too slow.
        """
        try:
            end = sockets.connect(self.address, self.port, patience_s)
        except OSError as error:
            where = f"{self.address}, port {self.port}"
            hint = "; MASTER_ADDR must be an address by which every machine reaches RANK 0's"
            raise EngineError(f"the driver does not listen at {where}: {error}{hint}") from None
        try:
            client_handshake(end, self.secret, subject, greeting_s=patience_s, limit_s=_STEP_LIMIT_S)
        except BaseException:
            end.close()
            raise
        return end


def find_driver(launch: Launch, given: UserSecret) -> Driver:
    """Finds the driver, from another process of the launcher.

    Raises:
        EngineError: it is not found in time, or there is no secret.
    """
    if given.value is None and not _can_share_a_file(launch):
        raise _no_secret(given)  # before looking for the driver, which raises the same error and exits
    if not launch.store:
        return Driver(sockets.resolve(launch.address), launch.port, _checked(given))
    try:
        store = _store(launch)
        store.wait([_key(launch)], timedelta(seconds=FIND_LIMIT_S))
        where = json.loads(store.get(_key(launch)))
    except RuntimeError as error:  # torch's DistError
        raise EngineError(f"the driver, RANK 0, was not found after {FIND_LIMIT_S:.0f} s: {error}") from None
    if given.value is not None:
        return Driver(where["address"], where["port"], _checked(given))
    if where["secret"] is None:
        raise EngineError(f"the driver was given {given.variable} and RANK {launch.rank} was not; set it for all")
    return Driver(where["address"], where["port"], secret.read(where["secret"]))


def _own_secret(launch: Launch, given: UserSecret) -> secret.SecretFile | None:
    if given.value is not None:
        return None
    if not _can_share_a_file(launch):
        raise _no_secret(given)
    return secret.SecretFile()


def _can_share_a_file(launch: Launch) -> bool:
    return launch.on_one_machine and launch.store


def _no_secret(given: UserSecret) -> EngineError:
    return EngineError(
        f"processes on several machines need a secret in common: set {given.variable} to the same text for all of "
        "them, for example what `openssl rand -hex 32` prints"
    )


def _checked(given: UserSecret) -> bytes:
    assert given.value is not None
    return secret.checked(given.value, given.variable)


def _listen(launch: Launch, known: bytes) -> Listener:
    if launch.on_one_machine and launch.store:
        return Listener("127.0.0.1", known)
    try:
        return Listener(sockets.resolve(launch.address), known, 0 if launch.store else launch.port)
    except OSError as error:
        raise EngineError(
            f"the driver cannot listen at MASTER_ADDR {launch.address}: {error}; give the launcher an address of "
            "the machine on which RANK 0 runs"
        ) from None


def _store(launch: Launch) -> TCPStore:
    return TCPStore(launch.address, launch.port, timeout=timedelta(seconds=FIND_LIMIT_S), wait_for_workers=False)


def _key(launch: Launch) -> str:
    return f"ranks-driver/{launch.run}"


def _number(environment: Mapping[str, str], name: str, *, least: int, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        number = least - 1
    if number < least:
        raise EngineError(f"{name} is {text!r}, not a number from {least} on")
    return number
