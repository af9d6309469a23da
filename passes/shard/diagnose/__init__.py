"""Answers to questions about a plan: why nothing fits, and what another choice would cost."""
