"""From a call to a sealed program and a plain graph: read, trace on shapes, flatten, copy out."""
