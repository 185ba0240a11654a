"""The chapter cost."""
