"""Writes plans as plain data and code that need no autopar, and reads other people's rules."""
