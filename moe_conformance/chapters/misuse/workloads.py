"""Register the scripts of wrong use of an exchange, which it must refuse."""

from __future__ import annotations

from moe_conformance.workloads.chapter import SMALL, TP2_EP2, Chapter
from moe_conformance.workloads.misuse import NAMES, draw
from moe_conformance.workloads.records.runs import ON_EXCHANGE

CHAPTERS = (Chapter((ON_EXCHANGE,), NAMES, draw, "every", (*SMALL, TP2_EP2)),)
