"""Files of counts and placements, ours and other engines'."""
