"""Builds native's trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.backends.native.layer.shared_experts import SharedExperts
from moe_conformance.backends.native.offered import offers
from moe_conformance.backends.native.training.sharded_state import ShardedTrainer
from moe_conformance.backends.native.training.trainer import GradientNorm, Trainer
from moe_conformance.contract import Config, Training

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


@offers("trainer", maps=None)
def trainer(session: NativeSession, config: Config) -> Trainer:
    """Build dense layers, which are shared experts of one expert, MoE layers, and their optimiser."""
    if session.topology.sizes["pp"] > 1:
        raise CannotBuild("native trains models of one pipeline stage")
    plain = replace(config, training=Training())
    wide = plain.changed({"shared.ffn": (config.ffn,)})
    dense = [
        session.use(SharedExperts)(wide, session.topology, session.device) for _ in range(config.training.dense_layers)
    ]
    layers = [*dense, *(session.surface("layer", plain) for _ in range(config.training.layers))]
    kind = session.use(ShardedTrainer) if config.training.sharded_state else session.use(Trainer)
    norm, finisher = session.use(GradientNorm), session.use(GradientFinisher)
    return kind(config, session.topology, layers, norm(session.topology), finisher(session.topology))
