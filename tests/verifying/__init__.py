"""Tests of what verifying a plan finds, and of what it does not let pass."""
