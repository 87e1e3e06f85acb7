"""Questions put to models that beat chance on their task: one a file, with run(config) -> Result."""
