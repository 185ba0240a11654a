"""The agent: what every process of a launcher but RANK 0's does, which is to fork ranks for the driver.

The agent is no rank, so that a fault on a rank ends only the rank. It runs one thread, has a `LocalHost` as the driver
has, and connects every rank to the driver: jobs and results do not pass through the agent.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn

from .. import wire
from ..faults import one_line
from ..hosts import Child, HostLostError, Placement
from ..local_host import LOOPBACK, LocalHost
from ..records import EngineError
from ..transport import visible_gpus
from . import messages, sockets
from .rendezvous import FIND_LIMIT_S, Driver, Launch, UserSecret, find_driver

_LOST = 1  # exit status if the driver has ended without Shutdown

# The methods of a LocalHost that take one rank or several.
_OF_ONE = ("last_stacks", "printed")
_OF_SEVERAL = ("begin", "signal", "stacks", "ledgers", "thread_stats")


def serve(launch: Launch, given: UserSecret) -> int:
    """Serves the driver until it ends the run, and returns the exit status for this process.

    The status is the run's, so that the launcher of every machine reports it; but 0 on the driver's node, where the
    launcher would else report this process as the one that failed. Nothing is printed: what ranks print is part of
    their results.

    Raises:
        EngineError: the driver cannot be found, or does not know the secret.
    """
    driver = find_driver(launch, given)
    signal.signal(signal.SIGTERM, _terminated)  # from here on there may be ranks to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the driver
    channel = wire.Channel(driver.connect(messages.control(launch.rank), FIND_LIMIT_S))
    sockets.limit_silence(channel.socket)
    with contextlib.closing(channel), _silence():
        agent = Agent(channel, driver)
        try:
            channel.send(wire.dumps(_info(launch)))
            status = agent.work()
            return 0 if launch.node == "0" else status
        except (EOFError, OSError):
            return _LOST
        except Exception as error:  # for example the fork server has exited; the driver reports it
            with contextlib.suppress(OSError):
                channel.send(wire.dumps(messages.Failed(one_line(error))))
            return _LOST
        finally:
            agent.close()


class Agent:
    """Handles the driver's requests over `channel`."""

    def __init__(self, channel: wire.Channel, driver: Driver) -> None:
        self._channel = channel
        self._driver = driver
        self._local_host: LocalHost | None = None
        self._children: dict[int, Child] = {}

    def work(self) -> int:
        """Handles requests until the driver sends Shutdown, and returns its status.

        Raises:
            EOFError, OSError: the driver has ended.
            HostLostError: the fork server has exited.
        """
        while True:
            self._wait()
            while self._channel.readable():
                request: messages.Request = wire.loads(self._channel.receive())
                if isinstance(request, messages.Shutdown):
                    return request.status
                reply = self._handle(request)
                if reply is not None:
                    self._channel.send(wire.dumps(reply))
            self._report_exits()

    def close(self) -> None:
        """Ends all ranks and the fork server."""
        if self._local_host is not None:
            self._local_host.close()
            self._local_host = None
        self._children.clear()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            for waker in self._local_host.wakers() if self._local_host is not None else ():
                selector.register(waker, selectors.EVENT_READ)
            selector.select()

    def _report_exits(self) -> None:
        if self._local_host is None:
            return
        self._local_host.collect()
        for child in list(self._children.values()):
            if (code := self._local_host.exit_code(child)) is not None:
                del self._children[child.pid]
                self._channel.send(wire.dumps(messages.Exited(child.pid, code)))

    def _handle(self, request: messages.Request) -> messages.Reply | None:
        if isinstance(request, messages.Close):
            self.close()
        elif isinstance(request, messages.Setup):
            return self._open(request)
        elif self._local_host is None:
            raise EngineError(f"the driver sent {type(request).__name__} before Setup")
        elif isinstance(request, messages.Kill):
            self._local_host.forget(request.pid)
            self._children.pop(request.pid, None)
        elif isinstance(request, messages.Start):
            return self._start(self._local_host, request)
        elif isinstance(request, messages.Invoke):
            return messages.Done(_invoke(self._local_host, request))
        return None

    def _open(self, setup: messages.Setup) -> messages.Reply:
        self.close()
        try:
            os.chdir(setup.folder)
            sys.path[:] = setup.path
            self._local_host = LocalHost(setup.preload, setup.environment, interface(self._channel.socket))
        except (EngineError, OSError) as error:
            return messages.Refused(str(error))
        return messages.Done()

    def _start(self, local_host: LocalHost, start: messages.Start) -> messages.Reply:
        try:
            pid = local_host.fork(start.spec, self._driver.connect(start.subject))
        except EngineError as error:
            if isinstance(error, HostLostError):
                raise
            return messages.Refused(str(error))
        self._children[pid] = Child(start.spec.rank, pid)
        return messages.Done(pid)


def interface(end: socket.socket) -> str | None:
    """Returns gloo's interface: GLOO_SOCKET_IFNAME, else that of a connection; None if it is not known.

    Args:
        end: A socket that connects the driver and an agent.
    """
    address = end.getsockname()[0]
    if sockets.is_loopback(address):
        return LOOPBACK
    return os.environ.get("GLOO_SOCKET_IFNAME") or sockets.interface_of(address)


def _invoke(local_host: LocalHost, call: messages.Invoke) -> object:
    if call.method in _OF_ONE:
        return getattr(local_host, call.method)(call.child, *call.arguments)
    if call.method not in _OF_SEVERAL:
        raise EngineError(f"{call.method!r} is not a method that the driver can invoke")
    answer = getattr(local_host, call.method)([call.child], *call.arguments)
    return None if answer is None else answer[call.child.rank]


def _info(launch: Launch) -> messages.AgentInfo:
    machine = f"{socket.gethostname()}{f', node {launch.node}' if launch.node else ''}"
    return messages.AgentInfo(machine, Placement(launch.local_rank, visible_gpus(None)), messages.versions())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Redirects stdout and stderr of this process and its children to /dev/null in the block."""
    sys.stdout.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)


def _terminated(number: int, frame: object) -> NoReturn:
    """Exits on a signal by SystemExit, so that the ranks are ended too; 128 + 15, as shells have it."""
    raise SystemExit(128 + number)
