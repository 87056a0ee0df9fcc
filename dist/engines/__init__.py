"""Expert-parallel layers and adapters: our own EP layer, torch modules, vLLM."""
