"""What inspect, replay and advise say about loads."""
