"""Causes of wrong tensors and rows: those that explain the most are tried first."""
