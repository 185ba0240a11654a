"""Children of a process are found and inherited; results that are too large are refused before they are copied."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moe_conformance.engine import processes, wire


class TestChildren:
    def test_only_children_that_run_are_living(self) -> None:
        """A child that has exited and was not waited for is a child, but not a running one."""
        sleeps = subprocess.Popen(["sleep", "600"])
        ended = subprocess.Popen(["true"], stdout=subprocess.PIPE)
        try:
            ended.stdout.read()
            assert {sleeps.pid, ended.pid} <= set(processes.children())
            while ended.pid in processes.running_children():
                pass
            assert "sleep 600" == processes.running_children()[sleeps.pid]
        finally:
            sleeps.kill()
            sleeps.wait()
            ended.communicate()

    def test_a_process_adopts_what_its_children_leave(self) -> None:
        """A grandchild in another session becomes a child once its parent has exited."""
        script = """
            import os, signal, subprocess, sys
            from moe_conformance.engine import processes
            processes.become_subreaper()
            start = "from subprocess import *; print(Popen(['sleep', '600'], start_new_session=True, stdout=-3).pid)"
            pid = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE).stdout)
            print([pid] == processes.children())
            os.kill(pid, signal.SIGKILL)
        """
        command = [sys.executable, "-c", "\n".join(line.strip() for line in script.splitlines())]
        assert "True" == subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


class TestLimit:
    @pytest.mark.parametrize(
        "value",
        [torch.ones(1).expand(1 << 38), [torch.empty(3 << 18), torch.empty(3 << 18)], bytes(5 << 20)],
        ids=["one tensor", "several", "no tensor"],
    )
    def test_a_value_beyond_the_limit_is_refused(self, value: object) -> None:
        """A value beyond the limit is refused; an expanded tensor is not copied to find out."""
        with pytest.raises(wire.TooLargeError, match=r"takes .* GiB, and more than 0\.0 GiB are not sent"):
            wire.dumps(value, limit=4 << 20)

    def test_a_value_within_the_limit_is_sent(self) -> None:
        """A value up to the limit is sent, and any value without a limit."""
        value = torch.arange(1 << 18)
        for limit in (None, 3 << 20):
            assert torch.equal(value, wire.loads([bytearray(b) for b in wire.dumps(value, limit)]))
