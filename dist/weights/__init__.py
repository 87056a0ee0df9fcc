"""Expert weights: where they lie, how they travel, how they are verified and committed."""
