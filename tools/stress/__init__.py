"""The stress job: `torchrun -m evenroute.tools.stress`."""
