"""Distributed Muon: what is orthogonalized where, decided from layouts before the first step (paper §6)."""
