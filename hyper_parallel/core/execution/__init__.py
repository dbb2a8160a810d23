"""Plans put to work: what a model's own code runs on, and what happens between its modules."""
