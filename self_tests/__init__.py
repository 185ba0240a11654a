"""The suite itself under test."""
