"""Waivers: known failures of a real backend, each with an owner, evidence and a date of review.

records.py    a waiver, and the items and faults with which it is compared
file.py       reads waivers/<backend>.toml, whose fields are described there
proposal.py   writes a waiver for failures of a run, to be completed by a person
"""

from __future__ import annotations

from .file import FOLDER, Unreadable, ids_in, is_of, load, path_for, valid, waiver_of
from .proposal import proposal
from .records import Failure, Fault, Item, Names, Waiver, Waivers, only_should

__all__ = [
    "FOLDER",
    "Failure",
    "Fault",
    "Item",
    "Names",
    "Unreadable",
    "Waiver",
    "Waivers",
    "ids_in",
    "is_of",
    "load",
    "only_should",
    "path_for",
    "proposal",
    "valid",
    "waiver_of",
]
