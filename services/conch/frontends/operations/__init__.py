"""The operations of the protocol other than inference: one table for both front ends."""
