"""A real vLLM on CPUs, for tests: `cpu` makes expert parallelism and EPLB run there, `models` writes random models,
`serve` runs an engine in a process of its own, `checks` hashes weights and notes switches in its workers."""
