"""Whether a sharded model is the model: one step under a plan held against one step on one device."""
