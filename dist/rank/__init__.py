"""The rank's side: the agent, its thread, counts, votes and switches."""
