"""Decides; pure."""
