"""No client gets past the handshake without the secret, and none can block the driver."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_conformance.engine import EngineError
from moe_conformance.engine.remote import secret, sockets
from moe_conformance.engine.remote.handshake import SUBJECT, HandshakeError, ServerHandshake, client_handshake
from moe_conformance.engine.remote.listener import Listener

SECRET = b"a secret of the test, and no other"
CONTROL = b"control".ljust(SUBJECT)
OTHER = b"other".ljust(SUBJECT)


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A listener on loopback."""
    listening = Listener("127.0.0.1", SECRET)
    yield listening
    listening.close()


@pytest.fixture
def dial(listener: Listener) -> Iterator[Callable[[], socket.socket]]:
    """Connects to the listener."""
    ends = []

    def connect() -> socket.socket:
        ends.append(sockets.connect(listener.address, listener.port, 5.0))
        return ends[-1]

    yield connect
    for end in ends:
        end.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected pair of sockets."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def in_thread(function: Callable[..., object], *arguments: Any, **named: Any) -> Callable[[], Exception | None]:
    """Calls a function in a thread; returns a function that waits for it and returns what it raised."""
    errors = []

    def run() -> None:
        try:
            function(*arguments, **named)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> Exception | None:
        thread.join(10)
        assert not thread.is_alive()
        return errors[0] if errors else None

    return ended


def calling(end: socket.socket, known: bytes = SECRET, subject: bytes = CONTROL) -> Callable[[], Exception | None]:
    """Runs the client's side of the handshake in a thread."""
    return in_thread(client_handshake, end, known, subject, greeting_s=5.0, limit_s=5.0)


class TestHandshake:
    def test_both_ends_that_know_the_secret_are_connected(
        self, listener: Listener, dial: Callable[[], socket.socket]
    ) -> None:
        """The server gets a connection under the client's subject, and data can be sent over it."""
        end = dial()
        ended = calling(end)
        theirs = listener.wait([CONTROL], 5.0)[CONTROL]
        assert ended() is None
        end.sendall(b"what follows")
        assert b"what follows" == theirs.recv(64)
        theirs.close()

    def test_a_client_with_a_wrong_secret_is_refused(
        self, listener: Listener, dial: Callable[[], socket.socket]
    ) -> None:
        """Its connection is closed, and the server records why."""
        ended = calling(dial(), known=b"guessed")
        assert {} == listener.wait([CONTROL], 0.3)
        assert "a client had the wrong secret" == listener.refused
        assert "closed the connection" in str(ended())

    def test_a_server_with_a_wrong_secret_is_refused(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """The client stops at a server that requests a proof and has none itself."""
        ours, theirs = pair
        ended = calling(ours)
        theirs.sendall(ServerHandshake(b"guessed").greeting)
        theirs.recv(4096)
        theirs.sendall(b"x" * 32)
        assert isinstance(error := ended(), HandshakeError)
        assert "has the wrong secret" in str(error)

    def test_a_reflected_proof_is_refused(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """A server that sends the client's proof and nonce back is refused."""
        ours, theirs = pair
        ended = calling(ours)
        theirs.sendall(ServerHandshake(b"guessed").greeting)
        answer = theirs.recv(4096)
        theirs.sendall(answer[-32:])
        assert isinstance(ended(), HandshakeError)

    def test_a_client_that_reflects_the_greeting_is_refused(self) -> None:
        """A client that has every proof of a real server, over the same nonces, is refused."""
        real, attacked = ServerHandshake(SECRET), ServerHandshake(SECRET)
        attacked._nonce = real._nonce
        left, right = socket.socketpair()
        with left, right:
            ended = calling(left)
            right.sendall(real.greeting)
            answer = right.recv(4096)
            real.feed(answer)
            right.sendall(real.proof)
            assert ended() is None
        with pytest.raises(HandshakeError):
            attacked.feed(answer[:-32] + real.proof)

    def test_what_was_heard_once_is_of_no_use_again(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """A proof for one greeting is refused for another."""
        ours, theirs = pair
        calling(ours)
        theirs.sendall(ServerHandshake(SECRET).greeting)
        answer = theirs.recv(4096)
        with pytest.raises(HandshakeError):
            ServerHandshake(SECRET).feed(answer)

    def test_another_subject_under_the_same_proof_is_refused(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """The subject of a connection is part of the proof."""
        ours, theirs = pair
        keeper = ServerHandshake(SECRET)
        calling(ours)
        theirs.sendall(keeper.greeting)
        answer = bytearray(theirs.recv(4096))
        answer[16 : 16 + SUBJECT] = OTHER
        with pytest.raises(HandshakeError):
            keeper.feed(bytes(answer))

    def test_garbage_is_refused_at_its_first_byte(self) -> None:
        """Another protocol is refused at the first wrong byte."""
        with pytest.raises(HandshakeError, match="another protocol"):
            ServerHandshake(SECRET).feed(b"G")

    def test_a_silent_server_costs_a_limited_time(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """A client stops waiting for a server that sends nothing, or only a part."""
        ours, theirs = pair
        theirs.sendall(b"rank")
        with pytest.raises(HandshakeError, match="took longer"):
            client_handshake(ours, SECRET, CONTROL, greeting_s=0.1, limit_s=5.0)

    def test_a_server_that_sends_byte_by_byte_has_no_more_time(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """The limit is for all bytes of a step together."""
        ours, theirs = pair
        stop = threading.Event()

        def drip() -> None:
            for byte in ServerHandshake(SECRET).greeting:
                if stop.wait(0.05):
                    return
                theirs.sendall(bytes([byte]))

        ended = in_thread(drip)
        with pytest.raises(HandshakeError, match="took longer"):
            client_handshake(ours, SECRET, CONTROL, greeting_s=0.2, limit_s=5.0)
        stop.set()
        assert ended() is None


class TestListener:
    def test_silent_slow_and_garbled_clients_hold_nobody_up(
        self, listener: Listener, dial: Callable[[], socket.socket]
    ) -> None:
        """A client with the secret is accepted while others are silent, slow, or send garbage."""
        dial()
        dial().sendall(b"ranks")
        dial().sendall(os.urandom(1 << 16))
        dial().sendall(b"ranks' agent 1" + os.urandom(1 << 16))
        dial().close()
        ended = calling(dial())
        found = listener.wait([CONTROL], 5.0)
        assert [CONTROL] == list(found)
        assert ended() is None
        found[CONTROL].close()

    def test_a_silent_client_is_dropped_in_the_end(
        self, listener: Listener, dial: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that sends nothing is dropped after the time limit."""
        monkeypatch.setattr("moe_conformance.engine.remote.listener._LIMIT_S", 0.05)
        end = dial()
        assert {} == listener.wait([CONTROL], 0.3)
        assert "a client was silent or too slow" == listener.refused
        end.settimeout(5.0)
        assert b"" == end.recv(4096)[48:]

    def test_crowds_make_room_for_the_latest(
        self, listener: Listener, dial: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A right client is accepted after more silent ones than are kept."""
        monkeypatch.setattr("moe_conformance.engine.remote.listener._MOST", 3)
        for _ in range(8):
            dial()
        ended = calling(dial())
        found = listener.wait([CONTROL], 5.0)
        assert [CONTROL] == list(found)
        assert ended() is None
        found[CONTROL].close()

    def test_clients_for_later_are_kept(self, listener: Listener, dial: Callable[[], socket.socket]) -> None:
        """Connections for subjects that are not waited for yet are kept."""
        early = calling(dial(), subject=OTHER)
        assert {} == listener.wait([CONTROL], 0.3)
        late = calling(dial())
        first, second = listener.wait([CONTROL], 5.0), listener.wait([OTHER], 5.0)
        assert early() is late() is None
        assert [CONTROL, OTHER] == [*first, *second]
        for end in (*first.values(), *second.values()):
            end.close()

    def test_waiting_in_vain_ends(self, listener: Listener) -> None:
        """A wait without a connection ends after its time limit."""
        began = time.monotonic()
        assert {} == listener.wait([CONTROL], 0.1)
        assert 0.1 <= time.monotonic() - began

    def test_it_listens_on_its_own_address_alone(self, listener: Listener) -> None:
        """The listener's address is loopback, not that of all interfaces."""
        assert "127.0.0.1" == listener._listener.getsockname()[0]


class TestSecret:
    def test_a_file_is_read_back(self) -> None:
        """Another process of the same user reads the same secret, until the file is removed."""
        made = secret.SecretFile()
        assert made.secret == secret.read(made.path)
        made.remove()
        with pytest.raises(EngineError, match="cannot be read"):
            secret.read(made.path)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
    def test_a_file_that_others_can_open_is_refused(self, tmp_path: Path, mode: int) -> None:
        """A file that other users could have read or written is refused."""
        path = tmp_path / "secret"
        path.write_bytes(b"x" * 64)
        path.chmod(mode)
        with pytest.raises(EngineError, match="not a private file"):
            secret.read(str(path))

    def test_a_file_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file of another user is refused."""
        path = tmp_path / "secret"
        path.write_bytes(b"x" * 64)
        path.chmod(0o600)
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(EngineError, match="not a private file"):
            secret.read(str(path))

    def test_links_pipes_and_other_contents_are_refused(self, tmp_path: Path) -> None:
        """A link could lead anywhere, a pipe could block, and a secret has one size."""
        path, link, pipe = tmp_path / "secret", tmp_path / "link", tmp_path / "pipe"
        path.write_bytes(b"short")
        path.chmod(0o600)
        link.symlink_to(path)
        os.mkfifo(pipe, 0o600)
        for refused in (path, link, pipe):
            with pytest.raises(EngineError):
                secret.read(str(refused))

    def test_a_short_secret_is_refused(self) -> None:
        """A secret that is too short is refused; the message names the variable and the remedy."""
        assert b"0123456789abcdef" == secret.checked("0123456789abcdef", "SECRET_OF_TEST")
        with pytest.raises(EngineError, match="SECRET_OF_TEST has 5 characters; give at least 16"):
            secret.checked("short", "SECRET_OF_TEST")
