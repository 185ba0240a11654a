"""The chapter gradients."""
