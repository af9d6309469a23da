"""Rewrites of a sealed step that keep what it computes.

splice          own equations and copies of equations in a program
reach           values that depend on some values
subprogram      chosen equations as a program of their own
later_calls     calls of Python that are made when the step has run
inline_remats   bodies of remat in line
remat           chosen forward values computed again for the backward pass
rescale         a factor taken out of a loop
layer_scans     scans over layers, and how rows of a stack go through equations
scan_split      those scans in pieces, so that stages can share the layers
split_values    values whole, in pieces, or both
"""
