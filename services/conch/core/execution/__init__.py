"""Runs batches on instances: runners, executor, response tracking, instance pool, warm-up."""
