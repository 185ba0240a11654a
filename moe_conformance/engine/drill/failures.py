"""Injected faults that end a rank or keep it from answering: exceptions, exits, signals, hangs."""

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
from .injection import Target, sum_over

_ROOM = 1 << 28  # bytes that a rank may still allocate once its memory is limited


def raise_on_one(context: RankContext, target: Target) -> None:
    """The faulty rank raises; the others wait for it in a collective."""
    sum_over()
    if context.rank == target.faulty:
        raise ValueError("drilled")
    sum_over()


def raise_on_all(context: RankContext, target: Target) -> None:
    """Every rank raises."""
    sum_over()
    raise ValueError(f"drilled on rank {context.rank}")


def raise_in_backward(context: RankContext, target: Target) -> None:
    """A backward hook raises on the faulty rank; the others call a collective in the same hook."""
    sum_over()

    def hook(gradient: torch.Tensor) -> None:
        if context.rank == target.faulty:
            raise ValueError("drilled")
        sum_over()

    x = torch.ones(3, requires_grad=True)
    y = 2 * x
    y.register_hook(hook)
    y.sum().backward()


def exit_hard(context: RankContext, target: Target) -> None:
    """The faulty rank's process exits by os._exit."""
    sum_over()
    if context.rank == target.faulty:
        os._exit(7)
    sum_over()


def be_killed(context: RankContext, target: Target) -> None:
    """The faulty rank's process is killed between two collectives."""
    sum_over()
    if context.rank == target.faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    sum_over()


def be_killed_in_a_collective(context: RankContext, target: Target) -> None:
    """The faulty rank is killed during a collective, as the kernel does when memory runs out."""
    sum_over()
    if context.rank == target.faulty:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        sum_over(size=10_000)


def touch_no_memory(context: RankContext, target: Target) -> None:
    """The faulty rank reads address 0."""
    sum_over()
    if context.rank == target.faulty:
        ctypes.string_at(0)
    sum_over()


def run_out_of_memory(context: RankContext, target: Target) -> None:
    """The faulty rank allocates more memory than its process may have; the machine has enough."""
    sum_over()
    if context.rank == target.faulty:
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, resource.RLIM_INFINITY))
        bytearray(2 * _ROOM)
    sum_over()


def sleep_for_ever(context: RankContext, target: Target) -> None:
    """The faulty rank sleeps; the others wait for it in a collective."""
    sum_over()
    while context.rank == target.faulty:
        time.sleep(1)
    sum_over()


def hold_the_gil(context: RankContext, target: Target) -> None:
    """The faulty rank runs C code for ever without releasing the GIL."""
    sum_over()
    if context.rank == target.faulty:
        re.compile(r"(a+)+$").match("a" * 64 + "b")
    sum_over()


def wait_for_a_lock(context: RankContext, target: Target) -> None:
    """The faulty rank waits for an event that is never set; the others wait for it in a collective."""
    sum_over()
    if context.rank == target.faulty:
        threading.Event().wait()
    sum_over()


def be_stopped(context: RankContext, target: Target) -> None:
    """The faulty rank is stopped by SIGSTOP."""
    sum_over()
    if context.rank == target.faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    sum_over()


def print_without_end(context: RankContext, target: Target) -> None:
    """The faulty rank prints line after line; the others wait for it in a collective."""
    sum_over()
    while context.rank == target.faulty:
        print("drilled " * 100)
    sum_over()
