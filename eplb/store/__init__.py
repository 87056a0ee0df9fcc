"""The history store: one SQLite file with windows, placements and events of a job."""
