"""Quantised rows by hand: every number of a format is written down, and the nearest one is looked for.

A block is b neighbouring columns of one row; the last of a row may have fewer. The gradient of what is sent is
that of the identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SCALE_SLACK = Fraction(1, 2**20)
VALUE_SLACK = Fraction(1, 2**16)


class Format(NamedTuple):
    """A floating format: its name, largest number, bits of the mantissa, exponent of the smallest normal number."""

    name: str
    largest: float
    mantissa_bits: int
    least_exponent: int


E4M3 = Format("e4m3", 448.0, 3, -6)
E5M2 = Format("e5m2", 57344.0, 2, -14)


@cache
def numbers(fmt: Format) -> list[Fraction]:
    """All that are not negative, ascending: equal steps up to twice the smallest normal number, then doubling."""
    step = Fraction(2) ** (fmt.least_exponent - fmt.mantissa_bits)
    found = [Fraction(0)]
    while found[-1] < fmt.largest:
        if len(found) > 2 ** (fmt.mantissa_bits + 1) and len(found) % 2**fmt.mantissa_bits == 1:
            step *= 2
        found.append(found[-1] + step)
    return found


def nearest(value: Fraction, fmt: Format) -> Fraction:
    """The nearest number of the format, of two the one with the even mantissa; beyond the largest, that one."""
    table, size = numbers(fmt), abs(value)
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if table[middle] <= size:
            low = middle
        else:
            high = middle
    to_low, to_high = size - table[low], table[high] - size
    even = low if low % 2 == 0 else high  # neighbours in the table have mantissas of different parity
    best = table[even if to_low == to_high else low if to_low < to_high else high]
    return best if value >= 0 else -best


def blocks(x_RD: Floats, block: int) -> Iterator[tuple[int, int, list[int]]]:
    """Row, number and columns of every block."""
    if block < 1:
        raise ValueError(f"block of {block} columns")
    R, D = x_RD.shape
    for r in range(R):
        for start in range(0, D, block):
            yield r, start // block, [d for d in range(start, start + block) if d < D]


def number_of_blocks(x_RD: Floats, block: int) -> int:
    """Blocks of one row."""
    if block < 1:
        raise ValueError(f"block of {block} columns")
    return math.ceil(Fraction(x_RD.shape[1], block))


def check_scales(x_RD: Floats, scales_RB: Floats, block: int) -> None:
    """One scale for every block."""
    if scales_RB.shape != (x_RD.shape[0], number_of_blocks(x_RD, block)):
        raise ValueError(f"scales {scales_RB.shape} for rows {x_RD.shape} in blocks of {block}")


def scales(x_RD: Floats, block: int, fmt: Format, *, power_of_two: bool = False, floor: float = 1e-4) -> Floats:
    """Scale (R, B) under which the largest number of each block becomes the largest of the format."""
    if not 0.0 < floor <= 1e-4 or not np.isfinite(x_RD).all():
        raise ValueError(f"floor {floor}, or a number that is none")
    made_RB = np.zeros((x_RD.shape[0], number_of_blocks(x_RD, block)), dtype=np.float64)
    for r, b, columns in blocks(x_RD, block):
        largest = floor
        for d in columns:
            largest = max(largest, abs(float(x_RD[r, d])))
        if not power_of_two:
            made_RB[r, b] = largest / fmt.largest
            continue
        power = Fraction(1)
        while power * Fraction(fmt.largest) < Fraction(largest):
            power *= 2
        while power / 2 * Fraction(fmt.largest) >= Fraction(largest):
            power /= 2
        made_RB[r, b] = float(power)
    return made_RB


def quantise(x_RD: Floats, scales_RB: Floats, block: int, fmt: Format) -> Floats:
    """Numbers of the format (R, D) nearest to x / s."""
    check_scales(x_RD, scales_RB, block)
    if not (np.isfinite(scales_RB).all() and (scales_RB > 0.0).all() and np.isfinite(x_RD).all()):
        raise ValueError(f"scales {scales_RB}, rows {x_RD}")
    q_RD = np.zeros(x_RD.shape, dtype=np.float64)
    for r, b, columns in blocks(x_RD, block):
        for d in columns:
            q_RD[r, d] = float(nearest(Fraction(float(x_RD[r, d])) / Fraction(float(scales_RB[r, b])), fmt))
    return q_RD


def dequantise(q_RD: Floats, scales_RB: Floats, block: int) -> Floats:
    """What arrives: s q."""
    check_scales(q_RD, scales_RB, block)
    v_RD = np.zeros(q_RD.shape, dtype=np.float64)
    for r, b, columns in blocks(q_RD, block):
        for d in columns:
            v_RD[r, d] = float(scales_RB[r, b]) * float(q_RD[r, d])
    return v_RD


def sent(x_RD: Floats, block: int, fmt: Format, *, power_of_two: bool = False) -> Floats:
    """What arrives of x."""
    own_RB = scales(x_RD, block, fmt, power_of_two=power_of_two)
    return dequantise(quantise(x_RD, own_RB, block, fmt), own_RB, block)


def bounds_of_scale(row: list[float], fmt: Format) -> tuple[Fraction, Fraction]:
    """The least and the largest scale that a block of these numbers may have."""
    largest, limit = max(abs(Fraction(value)) for value in row), Fraction(fmt.largest)
    return largest / limit * (1 - SCALE_SLACK), 2 * max(largest, Fraction(1e-4)) / limit * (1 + SCALE_SLACK)


def scale_bounds(x_RD: Floats, block: int, fmt: Format) -> tuple[Floats, Floats]:
    """The least and the largest scale of every block of numbers."""
    low_RB = np.zeros((x_RD.shape[0], number_of_blocks(x_RD, block)), dtype=np.float64)
    high_RB = low_RB.copy()
    for r, b, columns in blocks(x_RD, block):
        low, high = bounds_of_scale([float(x_RD[r, d]) for d in columns], fmt)
        low_RB[r, b], high_RB[r, b] = float(low), float(high)
    return low_RB, high_RB


def legal_scales(x_RD: Floats, scales_RB: Floats, block: int, fmt: Format) -> Bools:
    """Whether each block's scale fits its largest number."""
    check_scales(x_RD, scales_RB, block)
    legal_RB = np.zeros(scales_RB.shape, dtype=np.bool_)
    for r, b, columns in blocks(x_RD, block):
        row, scale = [float(x_RD[r, d]) for d in columns], float(scales_RB[r, b])
        if not all(math.isfinite(value) for value in row):
            legal_RB[r, b] = True
        elif math.isfinite(scale):
            low, high = bounds_of_scale(row, fmt)
            legal_RB[r, b] = not any(row) or low <= Fraction(scale) <= high
    return legal_RB


def legal_values(x_RD: Floats, v_RD: Floats, scales_RB: Floats, block: int, fmt: Format, *, unit: float = 0.0) -> Bools:
    """Whether what arrived is within the format's rounding of what was sent."""
    check_scales(x_RD, scales_RB, block)
    if v_RD.shape != x_RD.shape or not unit >= 0.0:
        raise ValueError(f"rows {x_RD.shape} arrive as {v_RD.shape}, unit {unit}")
    relative = Fraction(1, 2 ** (fmt.mantissa_bits + 1))
    absolute = Fraction(2) ** (fmt.least_exponent - fmt.mantissa_bits - 1)
    legal_RD = np.zeros(x_RD.shape, dtype=np.bool_)
    for r, b, columns in blocks(x_RD, block):
        spoilt = not all(math.isfinite(float(x_RD[r, d])) for d in columns)
        for d in columns:
            x, v, scale = float(x_RD[r, d]), float(v_RD[r, d]), float(scales_RB[r, b])
            if spoilt:
                legal_RD[r, d] = math.isfinite(x) or not math.isfinite(v)
            elif math.isfinite(v) and math.isfinite(scale):
                error = max(relative * abs(Fraction(x)), absolute * Fraction(scale)) * (1 + VALUE_SLACK)
                error += Fraction(unit) * abs(Fraction(v))
                close = abs(Fraction(v) - Fraction(x)) <= error
                legal_RD[r, d] = close and (v == 0.0 or (v > 0.0) == (x > 0.0)) and (v == 0.0 or x != 0.0)
    return legal_RD
