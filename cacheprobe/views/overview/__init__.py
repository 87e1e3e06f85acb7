"""Shows a whole run at a glance: figures over all requests, and a table of all tokens."""
