"""Waivers: known failures of a real backend, each with an owner, evidence and a day of review.

records.py    what a waiver says, and what it is compared with
file.py       reads waivers/<backend>.toml; the fields are described there
proposal.py   a waiver for what a run has found, to be completed by a person
"""

from __future__ import annotations

from .file import FOLDER, Unreadable, load, path_for, waiver_of
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
    "load",
    "only_should",
    "path_for",
    "proposal",
    "waiver_of",
]
