"""Measures the devices that are here and fits a cluster's figures to what they took."""
