"""Judges of steps that overlap exchanges, as the overlap chapter runs them and as accepted settings do."""
