"""Oracles of routers: selection, weights, jitter, replay, extreme logits."""
