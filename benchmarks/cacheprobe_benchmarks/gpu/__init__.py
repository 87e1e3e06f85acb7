"""Everything that needs a GPU, in one command: `make gpu`."""
