"""Shardings as an expert writes them by hand, in plain JAX, to judge planned ones by."""
