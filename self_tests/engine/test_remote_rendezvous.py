"""A launcher's processes read its environment, and find the driver through its store or port."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import TCPStore

from moe_conformance.engine import EngineError
from moe_conformance.engine.remote import rendezvous, sockets
from moe_conformance.engine.remote.handshake import SUBJECT
from moe_conformance.engine.remote.rendezvous import UserSecret, announce, find_driver, launch_of
from self_tests.engine.torchrun_runs import free_port

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "run",
}
NOTHING = UserSecret(None, "SECRET_OF_TEST")
SOMETHING = UserSecret("what everybody was given", "SECRET_OF_TEST")
SUBJECT_1 = b"1".ljust(SUBJECT)


@pytest.fixture
def launch() -> Callable[..., rendezvous.Launch]:
    """Returns launches of one run whose store is in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(**variables: str) -> rendezvous.Launch:
        return launch_of({**TORCHRUN, "MASTER_PORT": str(store.port), **variables})

    return make


class TestEnvironment:
    def test_without_a_launcher_there_is_no_launch(self) -> None:
        """A process that no launcher has started has no Launch."""
        assert launch_of({}) is None
        assert launch_of({"RANK": "0"}) is None

    def test_torchrun_is_read(self) -> None:
        """All fields are read from torchrun's variables."""
        launch = launch_of(TORCHRUN)
        assert (1, 4, 1, 4) == (launch.rank, launch.size, launch.local_rank, launch.local_size)
        assert ("localhost", 29500, True, "0") == (launch.address, launch.port, launch.store, launch.node)
        assert launch.on_one_machine

    def test_several_machines_are_told_apart_from_one(self) -> None:
        """A job is on one machine only if the launcher says that all processes are."""
        assert not launch_of({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}).on_one_machine
        bare = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        assert not launch_of(bare).on_one_machine
        assert not launch_of(bare).store

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"MASTER_PORT": ""}, "MASTER_PORT is not"),
            ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number from 1 on"),
            ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number from 1 on"),
            ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE only 4"),
            ({"TORCHELASTIC_RESTART_COUNT": "1"}, "use --max-restarts 0"),
        ],
    )
    def test_what_cannot_be_is_refused(self, change: dict[str, str], sentence: str) -> None:
        """The message names the variable, or what to do."""
        with pytest.raises(EngineError, match=sentence):
            launch_of({**TORCHRUN, **change})


class TestRendezvous:
    def meet(
        self,
        driver: rendezvous.Launch,
        other: rendezvous.Launch,
        drivers: UserSecret = NOTHING,
        others: UserSecret = NOTHING,
    ) -> tuple[socket.socket, socket.socket, str]:
        """Lets one process announce itself and another find it and connect; returns both ends."""
        listener, file = announce(driver, drivers)
        ends = []
        try:
            found = find_driver(other, others)
            thread = threading.Thread(target=lambda: ends.append(found.connect(SUBJECT_1)))
            thread.start()
            here = listener.wait([SUBJECT_1], 5.0)
            thread.join(5)
            return here[SUBJECT_1], ends[0], listener.address
        finally:
            listener.close()
            if file is not None:
                file.remove()

    def test_on_one_machine_nothing_need_be_given(self, launch: Callable[..., rendezvous.Launch]) -> None:
        """The secret is passed in a private file, and the listener is on loopback whatever MASTER_ADDR is."""
        ours, theirs, address = self.meet(launch(RANK="0"), launch(RANK="1"))
        with ours, theirs:
            theirs.sendall(b"here")
            assert b"here" == ours.recv(16)
            assert "127.0.0.1" == address

    def test_on_several_machines_the_secret_is_given(self, launch: Callable[..., rendezvous.Launch]) -> None:
        """With the same secret in all processes, they connect at MASTER_ADDR."""
        apart = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        ours, theirs, _ = self.meet(launch(RANK="0", **apart), launch(RANK="1", **apart), SOMETHING, SOMETHING)
        with ours, theirs:
            ours.sendall(b"there")
            assert b"there" == theirs.recv(16)

    def test_on_several_machines_without_a_secret_the_sentence_says_what_to_set(
        self, launch: Callable[..., rendezvous.Launch]
    ) -> None:
        """A file cannot be shared between machines, so that the run does not begin."""
        with pytest.raises(EngineError, match="set SECRET_OF_TEST to the same text for all"):
            announce(launch(RANK="0", LOCAL_WORLD_SIZE="1"), NOTHING)

    def test_on_several_machines_nobody_waits_for_a_driver_that_refused(
        self, launch: Callable[..., rendezvous.Launch], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The driver's agent, and its store, may be gone when the other looks for them: it need not look."""
        monkeypatch.setattr(rendezvous, "FIND_LIMIT_S", 0.2)
        gone = launch(RANK="1", LOCAL_WORLD_SIZE="1", MASTER_PORT=str(free_port()))
        with pytest.raises(EngineError, match="set SECRET_OF_TEST to the same text for all"):
            find_driver(gone, NOTHING)

    def test_a_secret_for_the_driver_alone_is_told(self, launch: Callable[..., rendezvous.Launch]) -> None:
        """The process that has no secret says so, and does not generate one."""
        listener, file = announce(launch(RANK="0"), SOMETHING)
        listener.close()
        assert file is None
        with pytest.raises(EngineError, match="RANK 1 was not; set it for all"):
            find_driver(launch(RANK="1"), NOTHING)

    def test_without_a_store_the_driver_listens_at_the_port_of_the_launcher(self) -> None:
        """Plain srun leaves MASTER_PORT free; a secret is needed, since nothing says that all share a machine."""
        port = str(free_port())
        plain = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        driver, other = (launch_of({"RANK": rank, **plain}) for rank in "01")
        ours, theirs, _ = self.meet(driver, other, SOMETHING, SOMETHING)
        assert int(port) == ours.getsockname()[1]
        ours.close()
        theirs.close()
        for refused in (announce, find_driver):
            with pytest.raises(EngineError, match="SECRET_OF_TEST"):
                refused(driver, NOTHING)

    def test_a_driver_that_does_not_come_is_told(
        self, launch: Callable[..., rendezvous.Launch], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The wait for the driver ends after the time limit."""
        monkeypatch.setattr(rendezvous, "FIND_LIMIT_S", 0.2)
        with pytest.raises(EngineError, match="RANK 0, was not found"):
            find_driver(launch(RANK="1"), NOTHING)

    def test_an_address_of_another_machine_is_refused(self, launch: Callable[..., rendezvous.Launch]) -> None:
        """RANK 0 must run on the machine of MASTER_ADDR; 192.0.2.1 is no machine's."""
        elsewhere = launch(RANK="0", MASTER_ADDR="192.0.2.1", LOCAL_WORLD_SIZE="1")
        with pytest.raises(EngineError, match=r"cannot listen at MASTER_ADDR 192\.0\.2\.1"):
            announce(elsewhere, SOMETHING)

    def test_the_file_is_private_and_goes_with_the_driver(self, launch: Callable[..., rendezvous.Launch]) -> None:
        """Only this user can read it, and it does not exist after remove()."""
        listener, file = announce(launch(RANK="0"), NOTHING)
        listener.close()
        assert 0o600 == os.stat(file.path).st_mode & 0o777
        file.remove()
        assert not os.path.exists(file.path)


class TestSockets:
    def test_the_interface_of_an_address_is_found(self) -> None:
        """The name of the loopback interface is found."""
        assert "lo" == sockets.interface_of("127.0.0.1")
        assert sockets.interface_of("192.0.2.1") is None

    def test_addresses_of_this_machine_alone_are_known(self) -> None:
        """Names are resolved first; IPv4 is preferred."""
        assert "127.0.0.1" == sockets.resolve("localhost")
        assert sockets.is_loopback("127.0.0.1")
        assert sockets.is_loopback("::1")
        assert not sockets.is_loopback("192.0.2.1")
