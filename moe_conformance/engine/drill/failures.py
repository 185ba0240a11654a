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
    """A backward hook raises on the faulty rank; the others sum_over in the same hook."""
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
    """The faulty rank's process exits without a word."""
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


def be_killed_while_meeting(context: RankContext, target: Target) -> None:
    """The faulty rank is killed in the middle of its work, as the kernel does when memory runs out."""
    sum_over()
    if context.rank == target.faulty:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        sum_over(size=10_000)


def touch_no_memory(context: RankContext, target: Target) -> None:
    """The faulty rank reads the address 0."""
    sum_over()
    if context.rank == target.faulty:
        ctypes.string_at(0)
    sum_over()


def run_out_of_memory(context: RankContext, target: Target) -> None:
    """The faulty rank asks for more memory than its process may have; the machine's is not touched."""
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
    """The faulty rank computes for ever in C, and no other thread of it gets a turn."""
    sum_over()
    if context.rank == target.faulty:
        re.compile(r"(a+)+$").match("a" * 64 + "b")
    sum_over()


def wait_for_a_lock(context: RankContext, target: Target) -> None:
    """The faulty rank waits for what never happens; the others wait for the faulty rank."""
    sum_over()
    if context.rank == target.faulty:
        threading.Event().wait()
    sum_over()


def be_stopped(context: RankContext, target: Target) -> None:
    """The faulty rank is stopped by a signal."""
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
