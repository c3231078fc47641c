"""Python models in processes of their own: what the server and a worker say to each other, and how."""
