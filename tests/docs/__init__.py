"""Tests of the documentation: what it shows is run."""
