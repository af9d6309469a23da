"""Answers about a plan, from its file alone."""
