"""The ledger: what every rank called of torch.distributed, and whether it fits together."""

from __future__ import annotations
