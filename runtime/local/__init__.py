"""What a device runs of each primitive, given how its operands lie."""
