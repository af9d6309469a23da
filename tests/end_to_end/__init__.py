"""Whole roads: a step as its user wrote it, planned, compiled and run on eight devices."""
