"""The shard pass: chooses a sharding for every op by integer programming."""
