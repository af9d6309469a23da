"""Compiles programs for hardware that is not here, each in a child process."""
