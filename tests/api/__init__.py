"""The front door: calls, plans, errors."""
