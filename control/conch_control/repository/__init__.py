"""Model repositories: which models and versions there are."""
