"""The shard pass: chooses a sharding for every op as an integer program."""
