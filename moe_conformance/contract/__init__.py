"""What an adapter implements, and all that it may be asked for: import everything from here.

`exchange` has the required parts (exchange, experts, router, session, backend) and says what the letters of shapes
mean, `surfaces` the optional ones, `config` every option, `claims` what a backend may say of itself, `limits` what it
may declare, `topology` the layouts of ranks.
"""

from __future__ import annotations

from moe_conformance.contract.exchange import Activation as Activation
from moe_conformance.contract.exchange import Backend as Backend
from moe_conformance.contract.exchange import Balance as Balance
from moe_conformance.contract.exchange import Capacity as Capacity
from moe_conformance.contract.exchange import Claiming as Claiming
from moe_conformance.contract.exchange import Claims as Claims
from moe_conformance.contract.exchange import Config as Config
from moe_conformance.contract.exchange import Counts as Counts
from moe_conformance.contract.exchange import Delivery as Delivery
from moe_conformance.contract.exchange import Exchange as Exchange
from moe_conformance.contract.exchange import ExpertFn as ExpertFn
from moe_conformance.contract.exchange import Experts as Experts
from moe_conformance.contract.exchange import Limit as Limit
from moe_conformance.contract.exchange import Losses as Losses
from moe_conformance.contract.exchange import Malformed as Malformed
from moe_conformance.contract.exchange import Named as Named
from moe_conformance.contract.exchange import Overflow as Overflow
from moe_conformance.contract.exchange import Overlap as Overlap
from moe_conformance.contract.exchange import Padding as Padding
from moe_conformance.contract.exchange import Parametrised as Parametrised
from moe_conformance.contract.exchange import Placed as Placed
from moe_conformance.contract.exchange import Read as Read
from moe_conformance.contract.exchange import ReceiveBuffer as ReceiveBuffer
from moe_conformance.contract.exchange import Replay as Replay
from moe_conformance.contract.exchange import Resolved as Resolved
from moe_conformance.contract.exchange import Routed as Routed
from moe_conformance.contract.exchange import Router as Router
from moe_conformance.contract.exchange import Routing as Routing
from moe_conformance.contract.exchange import RoutingOptions as RoutingOptions
from moe_conformance.contract.exchange import SharedExperts as SharedExperts
from moe_conformance.contract.exchange import SplitExchange as SplitExchange
from moe_conformance.contract.exchange import Strategy as Strategy
from moe_conformance.contract.exchange import Topology as Topology
from moe_conformance.contract.exchange import Unrouted as Unrouted
from moe_conformance.contract.exchange import Unsupported as Unsupported
from moe_conformance.contract.exchange import refusals as refusals
from moe_conformance.contract.exchange import whole as whole
from moe_conformance.contract.surfaces import BalancingRouters as BalancingRouters
from moe_conformance.contract.surfaces import CombineAdd as CombineAdd
from moe_conformance.contract.surfaces import ConfigRules as ConfigRules
from moe_conformance.contract.surfaces import Counted as Counted
from moe_conformance.contract.surfaces import Counters as Counters
from moe_conformance.contract.surfaces import Dense as Dense
from moe_conformance.contract.surfaces import Destinations as Destinations
from moe_conformance.contract.surfaces import DispatchLayout as DispatchLayout
from moe_conformance.contract.surfaces import EqualSplits as EqualSplits
from moe_conformance.contract.surfaces import Layer as Layer
from moe_conformance.contract.surfaces import LoadMeter as LoadMeter
from moe_conformance.contract.surfaces import MaskedRouter as MaskedRouter
from moe_conformance.contract.surfaces import Metered as Metered
from moe_conformance.contract.surfaces import MeteredPass as MeteredPass
from moe_conformance.contract.surfaces import MeteredResults as MeteredResults
from moe_conformance.contract.surfaces import OverlappedLayer as OverlappedLayer
from moe_conformance.contract.surfaces import OverlappedStep as OverlappedStep
from moe_conformance.contract.surfaces import PackedSequences as PackedSequences
from moe_conformance.contract.surfaces import Packing as Packing
from moe_conformance.contract.surfaces import Permutation as Permutation
from moe_conformance.contract.surfaces import Permuted as Permuted
from moe_conformance.contract.surfaces import Places as Places
from moe_conformance.contract.surfaces import PlacesExchange as PlacesExchange
from moe_conformance.contract.surfaces import Received as Received
from moe_conformance.contract.surfaces import Reordering as Reordering
from moe_conformance.contract.surfaces import ReplayRouters as ReplayRouters
from moe_conformance.contract.surfaces import RoutingForms as RoutingForms
from moe_conformance.contract.surfaces import RowIndex as RowIndex
from moe_conformance.contract.surfaces import ScatterAdd as ScatterAdd
from moe_conformance.contract.surfaces import Session as Session
from moe_conformance.contract.surfaces import Settings as Settings
from moe_conformance.contract.surfaces import TokenExchange as TokenExchange
from moe_conformance.contract.surfaces import TokenPadding as TokenPadding
from moe_conformance.contract.surfaces import Trained as Trained
from moe_conformance.contract.surfaces import TrainingRouters as TrainingRouters
from moe_conformance.contract.surfaces import Transport as Transport
from moe_conformance.contract.surfaces import VersionLimit as VersionLimit
