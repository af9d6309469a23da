"""Hostile inputs: files that were changed by hand, names that end what holds them."""
