"""Experts, shared experts, whole layers and finished gradients."""
