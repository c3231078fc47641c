"""`conch tune`: searches the settings of a model's config that serve it best."""
