"""Oracles of the exchange: deliveries, and the layer that it makes possible."""
