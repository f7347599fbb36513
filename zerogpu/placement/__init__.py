"""Placement: where tensors live, which devices there are, and what torch answers about them."""
