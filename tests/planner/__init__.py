"""Tests of the stage search as a whole."""
