"""Tests of what measures devices and fits figures, most of them on a bench that is made up."""
