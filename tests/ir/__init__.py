"""Tests of the plain data that flows between the rooms."""
