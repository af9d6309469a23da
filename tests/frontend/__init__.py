"""Tests of how a step is traced and what of it becomes the graph."""
