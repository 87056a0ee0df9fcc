"""Expert loads: what balance they give on ranks, and windows of loads from any source."""
