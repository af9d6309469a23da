"""Tests of autopar.demo."""
