"""Drilled faults that end a rank or keep it from its answer: exceptions, deaths, hangs."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import threading
import time

import torch

from .. import RankContext
from .plot import Plot, meet

_ROOM = 1 << 28  # bytes that a rank may still allocate once its memory is limited


def raise_on_one(context: RankContext, plot: Plot) -> None:
    """The faulty rank raises; the others wait for it in a collective."""
    meet()
    if context.rank == plot.faulty:
        raise ValueError("drilled")
    meet()


def raise_on_all(context: RankContext, plot: Plot) -> None:
    """Every rank raises."""
    meet()
    raise ValueError(f"drilled on rank {context.rank}")


def raise_in_backward(context: RankContext, plot: Plot) -> None:
    """A backward hook raises on the faulty rank; the others meet in the same hook."""
    meet()

    def hook(gradient: torch.Tensor) -> None:
        if context.rank == plot.faulty:
            raise ValueError("drilled")
        meet()

    x = torch.ones(3, requires_grad=True)
    y = 2 * x
    y.register_hook(hook)
    y.sum().backward()


def exit_hard(context: RankContext, plot: Plot) -> None:
    """The faulty rank's process exits without a word."""
    meet()
    if context.rank == plot.faulty:
        os._exit(7)
    meet()


def be_killed(context: RankContext, plot: Plot) -> None:
    """The faulty rank's process is killed between two collectives."""
    meet()
    if context.rank == plot.faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    meet()


def be_killed_while_meeting(context: RankContext, plot: Plot) -> None:
    """The faulty rank is killed in the middle of its work, as the kernel does when memory runs out."""
    meet()
    if context.rank == plot.faulty:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        meet(size=10_000)


def touch_no_memory(context: RankContext, plot: Plot) -> None:
    """The faulty rank reads the address 0."""
    meet()
    if context.rank == plot.faulty:
        ctypes.string_at(0)
    meet()


def run_out_of_memory(context: RankContext, plot: Plot) -> None:
    """The faulty rank asks for more memory than its process may have; the machine's is not touched."""
    meet()
    if context.rank == plot.faulty:
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, resource.RLIM_INFINITY))
        bytearray(2 * _ROOM)
    meet()


def sleep_for_ever(context: RankContext, plot: Plot) -> None:
    """The faulty rank sleeps; the others wait for it in a collective."""
    meet()
    while context.rank == plot.faulty:
        time.sleep(1)
    meet()


def hold_the_gil(context: RankContext, plot: Plot) -> None:
    """The faulty rank computes for ever in C, and no other thread of it gets a turn."""
    meet()
    if context.rank == plot.faulty:
        re.compile(r"(a+)+$").match("a" * 64 + "b")
    meet()


def wait_for_a_lock(context: RankContext, plot: Plot) -> None:
    """The faulty rank waits for what never happens; the others wait for the faulty rank."""
    meet()
    if context.rank == plot.faulty:
        threading.Event().wait()
    meet()


def be_stopped(context: RankContext, plot: Plot) -> None:
    """The faulty rank is stopped by a signal."""
    meet()
    if context.rank == plot.faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    meet()


def print_without_end(context: RankContext, plot: Plot) -> None:
    """The faulty rank prints line after line; the others wait for it in a collective."""
    meet()
    while context.rank == plot.faulty:
        print("drilled " * 100)
    meet()
