"""The chapter training."""
