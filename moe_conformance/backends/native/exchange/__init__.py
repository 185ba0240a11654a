"""Exchanges over torch.distributed, and what surrounds any of them."""
