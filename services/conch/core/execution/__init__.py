"""Instances of models: where they live, what drives them, how a batch is executed."""
