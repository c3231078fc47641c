"""Tables of columns as the inputs of a model, and its outputs as columns."""
