"""Model repositories: finds models, their versions and their files, locally or in object stores."""
