"""The framework-neutral core: it decides, a backend obeys."""
