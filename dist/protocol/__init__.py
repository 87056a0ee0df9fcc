"""The switch protocol as state machines without I/O."""
