"""The interface between the suite and an adapter. An adapter imports every name from this package.

session.py    backend and session: begin here
exchange.py   exchange, experts and router, and what the letters of shapes mean
config.py     every option that a surface may be asked for
claims.py     what a backend states about itself where correct implementations differ
limits.py     cases that a backend declares must not be run
errors.py     exceptions that a backend raises, such as where it cannot do something
topology.py   layouts of ranks and their process groups

The surface.py of a chapter, in `moe_conformance/chapters/<chapter>/`, may add surfaces, a section of `Config` and
claims, which this package exports too. docs/glossary.md has the terms, and the option of Megatron-Core,
torchtitan, transformers and DeepSpeed for each field of `Config`.
"""

from __future__ import annotations

from moe_conformance.contract.assembled import *  # noqa: F403  # the surfaces of chapters: see assembled.py
from moe_conformance.contract.claims import Claims as Claims
from moe_conformance.contract.config import Config as Config
from moe_conformance.contract.errors import Malformed as Malformed
from moe_conformance.contract.errors import Overflow as Overflow
from moe_conformance.contract.errors import Unsupported as Unsupported
from moe_conformance.contract.errors import refusals as refusals
from moe_conformance.contract.exchange import Claiming as Claiming
from moe_conformance.contract.exchange import Counts as Counts
from moe_conformance.contract.exchange import Delivery as Delivery
from moe_conformance.contract.exchange import Exchange as Exchange
from moe_conformance.contract.exchange import ExpertFn as ExpertFn
from moe_conformance.contract.exchange import Experts as Experts
from moe_conformance.contract.exchange import Named as Named
from moe_conformance.contract.exchange import Parametrised as Parametrised
from moe_conformance.contract.exchange import Placed as Placed
from moe_conformance.contract.exchange import Read as Read
from moe_conformance.contract.exchange import Resolved as Resolved
from moe_conformance.contract.exchange import Routed as Routed
from moe_conformance.contract.exchange import Router as Router
from moe_conformance.contract.exchange import Routing as Routing
from moe_conformance.contract.exchange import SplitExchange as SplitExchange
from moe_conformance.contract.exchange import Unrouted as Unrouted
from moe_conformance.contract.exchange import whole as whole
from moe_conformance.contract.limits import Limit as Limit
from moe_conformance.contract.session import Backend as Backend
from moe_conformance.contract.session import Session as Session
from moe_conformance.contract.session import Topology as Topology
