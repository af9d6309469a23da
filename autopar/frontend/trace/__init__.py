"""The way in: a call is read and traced on shapes, flattened, and copied out as a plain graph."""
