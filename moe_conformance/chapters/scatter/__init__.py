"""The chapter scatter."""
