"""The sharding problem as numbers, and the search for its cheapest assignment that fits."""
