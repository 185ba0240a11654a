"""The spec and the documents that are made of it, under test."""
