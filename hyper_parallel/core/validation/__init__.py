"""Validation: a plan carried out as in production, by tensors that say how they lie."""
