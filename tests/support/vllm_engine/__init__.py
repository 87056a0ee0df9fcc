"""A real vLLM on CPUs, for tests: `cpu` makes expert parallelism and EPLB run there, `models` writes random models,
`serve` runs an engine in a process of its own, `planner` never stays, `checks` hashes weights and notes switches in its
workers. `wheels` reads the seams of every version that is known."""
