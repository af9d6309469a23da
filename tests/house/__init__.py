"""Tests of the house itself: its sizes, manners, floors, public names and version."""
