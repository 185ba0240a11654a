"""Runs pytest in a child process, so that nothing in it can end the command with another status than its verdict.

An adapter is code of others: `os._exit(0)` in it, or in a library, would end pytest's process as if all had passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

import click

_FROM_TERMINAL = 128  # si_code of a signal of the kernel: the terminal sends it to the child too
_PR_SET_PDEATHSIG = 1
_WATCHED = ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def supervised(run: Callable[[], int]) -> int:
    """Call a function in a child process, and return the exit status that it returned.

    The child is a fork: nothing is imported twice. Signals are forwarded to it, and it ends with this process. A child
    that ends before the function returned has no status: an exit status of 0 is then one of 1. Where the system cannot
    wait for a signal, the function is called in this process.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return run()
    watched = {signal.Signals[name] for name in _WATCHED}
    told, tell = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(told)
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = run()
        sys.stdout.flush()  # before what an adapter does as the process ends
        sys.stderr.flush()
        os.write(tell, str(status).encode())
        return status
    os.close(tell)
    ended = _wait(child, watched)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _status(_told(told), ended)


def _end_with(parent: int) -> None:
    """End this process by SIGKILL once its parent has ended, by whatever signal."""
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _wait(child: int, watched: set[signal.Signals]) -> int:
    """Forward signals to the child until it ends; return its exit status, or minus the signal that ended it."""
    while True:
        received = signal.sigwaitinfo(watched)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code != _FROM_TERMINAL:
                os.kill(child, received.si_signo)
            continue
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(ended)


def _told(descriptor: int) -> int | None:
    """Return the status that the function returned, None if it did not; a process that is left may hold the pipe."""
    os.set_blocking(descriptor, False)
    with open(descriptor, "rb", buffering=0) as pipe:
        text = pipe.read(64)
    return int(text) if text else None


def _status(told: int | None, ended: int) -> int:
    """Return the exit status of the command.

    Args:
        told: The status that the function returned; None if the child ended before.
        ended: The exit status of the child, or minus the signal that ended it.
    """
    if told is None and ended >= 0:
        if ended == 0:
            click.echo("the run ended without a verdict: something in it called os._exit(0)", err=True)
        return ended or 1
    if told is None:
        click.echo(f"the run was ended by {signal.Signals(-ended).name}; it has no verdict", err=True)
    return told or (ended if ended >= 0 else 128 - ended)
