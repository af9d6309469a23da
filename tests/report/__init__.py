"""Tests of autopar.report."""
