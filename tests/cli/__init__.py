"""Tests of the command line: exit codes, what is printed, and what is told of wrong input."""
