"""Compiled programs: what their optimized HLO text says of collectives and time."""
