"""Python models in processes of their own."""
