"""The chapter losses."""
