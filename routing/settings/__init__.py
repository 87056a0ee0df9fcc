"""What a router is built for: its configuration and checks of what callers hand in."""
