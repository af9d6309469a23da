"""Tests of pipeline schedules: their pictures, their laws, and their times."""
