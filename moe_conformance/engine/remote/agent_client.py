"""The driver's connection to one agent: sends requests and receives replies."""

from __future__ import annotations

import contextlib
import time

from .. import wire
from ..hosts import Child, MachineLostError, RankProcess
from ..records import EngineError
from . import messages

_ANSWER_LIMIT_S = 60.0  # for requests that take at most two seconds


class AgentClient:
    """Sends requests to one agent and receives its replies.

    Raises:
        MachineLostError: from any method but `dismiss`, if the agent has ended, or a message to it was interrupted.
    """

    def __init__(self, rank: int, channel: wire.Channel) -> None:
        self.rank = rank
        self.channel = channel
        self._unusable: str | None = None
        self._exits: dict[int, int] = {}
        self._owed = 0  # replies not received yet, also of calls that were interrupted
        channel.socket.settimeout(_ANSWER_LIMIT_S)
        info = self._receive()
        assert isinstance(info, messages.AgentInfo), info
        self.info: messages.AgentInfo = info

    def ask(self, request: messages.Setup | messages.Start | messages.Invoke) -> None:
        """Sends a request, whose reply `answer` must then take."""
        while self._owed:
            self._take()
        self._send(request)
        self._owed += 1

    def answer(self, limit_s: float = _ANSWER_LIMIT_S) -> object:
        """Waits for the reply to a request and returns its value.

        Raises:
            EngineError: it was refused.
        """
        self.channel.socket.settimeout(limit_s)
        reply = self._take()
        if isinstance(reply, messages.Refused):
            raise EngineError(reply.reason)
        return reply.value

    def collect(self) -> None:
        """Reads all exits that were reported so far, without waiting."""
        while self.channel.readable():
            self._record(self._receive())

    def exit_code(self, child: Child) -> int | None:
        """Returns a rank's exit code; None if it had not exited at the last `collect`."""
        return self._exits.get(child.pid)

    def wait(self, child: Child, patience_s: float) -> int | None:
        """Waits until a rank has exited and returns its exit code; None if it has not within `patience_s`."""
        until = time.monotonic() + patience_s
        self.collect()
        while child.pid not in self._exits and self.channel.readable(max(0.0, until - time.monotonic())):
            self._record(self._receive())
        return self.exit_code(child)

    def started(self, pid: int) -> None:
        """Forgets the exit of an earlier process with this pid."""
        self._exits.pop(pid, None)

    def forget(self, process: RankProcess) -> None:
        """Kills a rank, unless the agent and all its ranks have ended."""
        with contextlib.suppress(MachineLostError):
            self._send(messages.Kill(process.pid))

    def dismiss(self, request: messages.Close | messages.Shutdown) -> None:
        """Sends a last request, if the agent is still connected."""
        with contextlib.suppress(MachineLostError):
            self._send(request)

    def _send(self, request: messages.Request) -> None:
        self._require_usable()
        try:
            self.channel.send(wire.dumps(request))
        except OSError as error:
            self._unusable = f"its connection broke: {error}"
            raise self._lost() from None
        except BaseException:
            self._unusable = "the driver was interrupted while it sent or received a message"
            raise

    def _take(self) -> messages.Done | messages.Refused:
        """Returns the next reply, and records the exits that are reported before it."""
        while not isinstance(reply := self._receive(), messages.Done | messages.Refused):
            self._record(reply)
        self._owed -= 1
        return reply

    def _receive(self) -> object:
        self._require_usable()
        try:
            return wire.loads(self.channel.receive())
        except (EOFError, OSError) as error:
            self._unusable = "it has ended" if isinstance(error, EOFError) else f"its connection broke: {error}"
        except BaseException:
            self._unusable = "the driver was interrupted while it sent or received a message"
            raise
        raise self._lost()

    def _record(self, reply: object) -> None:
        if isinstance(reply, messages.Failed):
            self._unusable = reply.reason
            raise self._lost()
        if isinstance(reply, messages.Done | messages.Refused):  # the reply to a call that was interrupted
            self._owed -= 1
            return
        assert isinstance(reply, messages.Exited), reply
        self._exits[reply.pid] = reply.code

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise self._lost()

    def _lost(self) -> MachineLostError:
        return MachineLostError(f"the process of RANK {self.rank} is lost: {self._unusable}")
