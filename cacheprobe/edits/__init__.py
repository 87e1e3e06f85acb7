"""Changes of states: interventions, patching, gradients and patchscopes."""
