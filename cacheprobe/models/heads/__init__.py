"""Draft heads as models: their modules, their published layouts, and HeadLM, which runs them on a KVCache."""
