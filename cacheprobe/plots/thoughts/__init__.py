"""Pictures of the thoughts of a Thinking States model."""
