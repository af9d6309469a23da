"""Tests of the sharding rules and of what devices run under them."""
