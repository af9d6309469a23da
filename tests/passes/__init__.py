"""Tests of the deciding wing, with the steps and drivers that they share."""
