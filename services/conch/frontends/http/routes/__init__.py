"""The routes of the REST front end other than inference."""
