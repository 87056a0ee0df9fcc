"""The benchmarks behind `evenroute bench`."""
