"""Classifies error messages that report a fault of the machine: GPU memory errors, lost links, missing drivers.

Such a fault must not be blamed on the code under test, and a fault of that code must not be excused as one: what
code can cause itself (an illegal address, a failed assertion on the device, exhausted device memory, a lost peer) never
counts, nor does a text that reports both.
"""

from __future__ import annotations

import re

# The driver's kernel log, where a process or a container repeats it: "NVRM: Xid (PCI:0000:3b:00): 79, ...".
_XID = re.compile(r"\bXid\b[^:\n]*\([^)\n]*\):\s*(?P<number>\d+)")

# Numbers that code on the device causes: NVIDIA's catalogue answers them with "restart or check the application".
_XIDS_OF_CODE = frozenset({6, 8, 11, 13, 31, 32, 43, 45, 68, 69, 126, 127, 128})

# Errors of the code under test, in CUDA's words; NCCL and the driver report errors as a consequence.
_CODES_OWN = re.compile(
    r"illegal memory access|device-side assert|misaligned address|illegal instruction|invalid program counter"
    r"|unspecified launch failure|operation not supported on global/shared address space|illegal address"
    r"|CUDA out of memory|CUDA error: out of memory|Cuda failure (\d+ )?'out of memory'|Duplicate GPU detected",
    re.IGNORECASE,
)

# What is reported, by phrases of CUDA, the driver, NCCL, torch and Python.
_PHRASES = {
    "memory error of a GPU": r"uncorrectable ECC error|ECC_UNCORRECTABLE|double[- ]bit ECC error",
    "link between GPUs failed": r"uncorrectable NVLink error|NVLINK_UNCORRECTABLE",
    "GPU lost": r"GPU has fallen off the bus|GPU is lost|GPU_IS_LOST",
    "GPU busy or unavailable": r"CUDA-capable device\(s\) is/are busy or unavailable",
    "no usable GPU": r"no CUDA-capable device|Found no NVIDIA driver|CUDA unknown error",
    "driver too old": r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
    "driver and its library differ": r"Driver/library version mismatch",
    "links between GPUs not ready": r"system not yet initialized|SYSTEM_NOT_READY|fabric manager is not running",
    "NCCL met a system error": r"\bncclSystemError\b|NCCL error.*unhandled system error",
    "NCCL did not start": r"Failed to initialize (NCCL|any NET plugin)|Bootstrap : no socket interface found",
    "network unreachable": r"No route to host|Network is unreachable",
    "host memory exhausted": r"\[Errno 12\]",
    "limit of processes reached": r"fork.*\[Errno 11\]",
    "no space left on a disk": r"No space left on device",
    "limit of open files reached": r"\[Errno 2[34]\]|too many open files",
}

# NCCL reports a system error for a lost peer too.
_PEER_LOST = re.compile(r"connection (was )?(closed|reset) by (remote )?peer|remote process exit", re.IGNORECASE)


def classify(text: str) -> str | None:
    """Returns which fault of the machine a text reports, with the line that reports it; None if there is none.

    For example `"memory error of a GPU: RuntimeError: CUDA error: uncorrectable ECC error encountered"`. None for an
    empty text, and for one that also reports a fault of the code under test.
    """
    if _CODES_OWN.search(text):
        return None
    for number in _XID.finditer(text):
        if int(number["number"]) not in _XIDS_OF_CODE:
            return f"GPU reported Xid {number['number']}: {_line(text, number)}"
    for meaning, phrase in _PHRASES.items():
        found = re.search(phrase, text, re.IGNORECASE)
        if found and not (meaning.startswith("NCCL") and _PEER_LOST.search(text)):
            return f"{meaning}: {_line(text, found)}"
    return None


def _line(text: str, found: re.Match[str]) -> str:
    start = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    return text[start : end if end >= 0 else None].strip()
